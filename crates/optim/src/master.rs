//! The exact values of parameters, in each [`crate::MasterFormat`].

use crate::form::{MASTER, REMAINDER};
use crate::host::{store, store_f32};
use crate::saved::{Find, REAL, RestoreError, SavedState};
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
    let own = 0..values.len();
    match master {
        MasterOperand::Parameters => Ok(()),
        MasterOperand::F32(out) => store_f32(kernels, space, out.rows(own), values),
        MasterOperand::Remainder(out) => {
            let remainders: Vec<i16> = values.iter().map(|value| split(*value).1).collect();
            let bytes = bytemuck::cast_slice(&remainders);
            store(kernels, space, out.rows(own), bytes)
        }
        MasterOperand::RemainderByte(out) => {
            let remainders: Vec<u8> = values.iter().map(|value| split_24_bits(*value).1).collect();
            store(kernels, space, out.rows(own), &remainders)
        }
    }
}

/// The master state that was saved with a parameter: an exact one (f32 or bf16), a remainder (i16), or the byte of a master of 24
/// bits (u8). If there is none, the saved parameters are exact.
pub(crate) struct SavedMaster<'a>(Option<SavedState<'a>>);

impl<'a> SavedMaster<'a> {
    pub(crate) fn find(entry: &Entry, find: Find<'_, 'a>) -> Result<SavedMaster<'a>, RestoreError> {
        let n = entry.elements();
        if let Some(master) = find(MASTER.kind) {
            return Ok(SavedMaster(Some(master.checked(entry, n, REAL)?)));
        }
        let remainder = find(REMAINDER.kind);
        let checked = remainder.map(|saved| saved.checked(entry, n, &[DType::I16, DType::U8]));
        Ok(SavedMaster(checked.transpose()?))
    }

    /// Whether parameters kept in the type `weights` must be set from the exact weights, rather than from the saved
    /// parameters: in f32, or if masters are rounded to 24 bits, and the saved ones were not.
    pub(crate) fn refines(&self, weights: DType, rounds: bool) -> bool {
        let is_finer =
            |saved: &SavedState| weights == DType::F32 || rounds && saved.dtype != DType::U8;
        self.0.as_ref().is_some_and(is_finer)
    }

    /// The exact weights of some of the parameter's elements. `weights` are the saved parameters of these elements,
    /// widened.
    pub(crate) fn values(
        &self,
        elements: &Range<usize>,
        parameters: Vec<f32>,
    ) -> Result<Vec<f32>, FilesError> {
        let Some(saved) = &self.0 else {
            return Ok(parameters);
        };
        match saved.dtype {
            DType::I16 | DType::U8 => Ok(joined(&parameters, saved.dtype, &saved.part(elements)?)),
            _ => saved.widened(elements),
        }
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
