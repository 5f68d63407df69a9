//! The exact values of parameters, in each [`crate::MasterFormat`].

use crate::form::{MASTER, REMAINDER};
use crate::host::{store, store_f32};
use crate::saved::{RestoreError, SavedState, state_name};
use files::FilesError;
use half::bf16;
use kernels::split::{join, join_24_bits, round_to_24_bits, split, split_24_bits};
use kernels::{Kernels, MasterOperand, Result};
use memory::{DType, Entry, Space};
use std::borrow::Cow;
use std::ops::Range;

/// The bytes of exact weights as f32 or bf16 parameters, rounded as updates round them.
pub fn weight_bytes(dtype: DType, values: &[f32]) -> Cow<'_, [u8]> {
    if dtype == DType::F32 {
        return Cow::Borrowed(bytemuck::cast_slice(values));
    }
    let mut bytes = vec![0; 2 * values.len()];
    let halves = bytes.as_chunks_mut().0.iter_mut();
    for (half, value) in halves.zip(values) {
        *half = split(*value).0.to_le_bytes();
    }
    Cow::Owned(bytes)
}

/// Exact weights as their masters hold them, from which parameters are rounded too: of 24 bits if `rounds`.
pub(crate) fn held(values: Cow<'_, [f32]>, rounds: bool) -> Cow<'_, [f32]> {
    match rounds {
        true => values.iter().copied().map(round_to_24_bits).collect(),
        false => values,
    }
}

/// Sets the master state of the first parameters, one per exact weight in `values`.
pub(crate) fn set_master(
    kernels: &Kernels,
    space: Space,
    master: MasterOperand,
    values: &[f32],
) -> Result {
    match master {
        MasterOperand::Parameters => Ok(()),
        MasterOperand::F32(out) => store_f32(kernels, space, out.rows(0..values.len()), values),
        MasterOperand::Remainder(out) => {
            let out = out.rows(0..values.len());
            let remainders: Vec<i16> = values.iter().map(|value| split(*value).1).collect();
            store(kernels, space, out, bytemuck::cast_slice(&remainders))
        }
        MasterOperand::RemainderByte(out) => {
            let out = out.rows(0..values.len());
            let remainders: Vec<u8> = values.iter().map(|value| split_24_bits(*value).1).collect();
            store(kernels, space, out, &remainders)
        }
    }
}

/// The master state that was saved with a parameter.
pub(crate) enum SavedMaster<'a> {
    /// None: the saved parameters are exact.
    Parameters,
    Exact(SavedState<'a>),
    /// Whole, or the byte of a master of 24 bits.
    Remainder(SavedState<'a>),
}

impl<'a> SavedMaster<'a> {
    pub(crate) fn find(
        entry: &Entry,
        find: &dyn Fn(&str) -> Option<SavedState<'a>>,
    ) -> Result<SavedMaster<'a>, RestoreError> {
        let n = entry.elements();
        if let Some(master) = find(&state_name(entry, MASTER.kind)) {
            return Ok(SavedMaster::Exact(master.real(entry, n)?));
        }
        Ok(match find(&state_name(entry, REMAINDER.kind)) {
            Some(remainder) => {
                let dtype = match remainder.dtype {
                    DType::U8 => DType::U8,
                    _ => DType::I16,
                };
                SavedMaster::Remainder(remainder.exactly(entry, n, dtype)?)
            }
            None => SavedMaster::Parameters,
        })
    }

    /// Whether parameters kept in the type `weights` must be set from the exact weights, rather than from the saved
    /// parameters: in f32, or if masters are rounded to 24 bits, and the saved ones were not.
    pub(crate) fn refines(&self, weights: DType, rounds: bool) -> bool {
        let is_finer = match self {
            SavedMaster::Parameters => return false,
            SavedMaster::Exact(_) => true,
            SavedMaster::Remainder(remainder) => remainder.dtype != DType::U8,
        };
        weights == DType::F32 || rounds && is_finer
    }

    /// The exact weights of some of the parameter's elements. `weights` are the saved parameters of these elements,
    /// widened.
    pub(crate) fn values(
        &self,
        elements: &Range<usize>,
        parameters: Vec<f32>,
    ) -> Result<Vec<f32>, FilesError> {
        Ok(match self {
            SavedMaster::Parameters => parameters,
            SavedMaster::Exact(master) => master.widened(elements)?,
            SavedMaster::Remainder(remainder) => {
                joined(&parameters, remainder.dtype, &remainder.part(elements)?)
            }
        })
    }
}

/// Joins bf16 weights, given as f32, with their little-endian remainders.
fn joined(weights: &[f32], dtype: DType, remainders: &[u8]) -> Vec<f32> {
    let weights = weights.iter().copied().map(bf16::from_f32);
    if dtype == DType::U8 {
        let pairs = weights.zip(remainders);
        return pairs
            .map(|(weight, byte)| join_24_bits(weight, *byte))
            .collect();
    }
    let pairs = weights.zip(remainders.as_chunks().0);
    pairs
        .map(|(weight, bytes)| join(weight, i16::from_le_bytes(*bytes)))
        .collect()
}
