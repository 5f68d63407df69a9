//! The exact weights behind the parameters, in their format.

use crate::MasterFormat;
use crate::cover::Cover;
use crate::named::{NamedState, RestoreError, SavedState, state_name};
use crate::storage::{Storage, store, store_f32};
use half::bf16;
use kernels::split::{join, split};
use kernels::{KernelError, Kernels, MasterOperand};
use memory::{Arena, Buffer, DType, Entry, In, Out, OutOfMemory, Space};
use std::ops::Range;

/// What stands beside the parameters, if anything does.
pub(crate) enum MasterWeights {
    /// The parameters are all there is.
    Parameters,
    F32(Held),
    Remainder(Held),
}

/// A buffer, and which elements of the layout it holds.
pub(crate) struct Held {
    buffer: Buffer,
    cover: Cover,
    space: Space,
}

const F32: &str = "master";
const REMAINDER: &str = "remainder";

impl Held {
    fn rows(&self, range: &Range<usize>) -> Range<usize> {
        let rows = self.cover.rows(range);
        rows.expect("whoever asks for states asks where they are held")
    }

    fn flat(&self, range: &Range<usize>) -> In<'_> {
        self.buffer.view().rows(self.rows(range))
    }

    fn flat_mut(&mut self, range: &Range<usize>) -> Out<'_> {
        let rows = self.rows(range);
        self.buffer.view_mut().rows(rows)
    }
}

impl MasterWeights {
    pub(crate) fn lease(
        storage: Storage,
        cover: &Cover,
        format: MasterFormat,
        weights: DType,
    ) -> Result<MasterWeights, OutOfMemory> {
        let lease = |name, dtype| {
            let held = |buffer| Held {
                buffer,
                cover: cover.clone(),
                space: storage.space,
            };
            let leased = storage.lease(name, cover.elements(), dtype);
            leased.map(|buffer| buffer.map(held))
        };
        let held = match format {
            _ if weights == DType::F32 => None,
            MasterFormat::None => None,
            MasterFormat::F32 => lease(F32, DType::F32)?.map(MasterWeights::F32),
            MasterFormat::Remainder => lease(REMAINDER, DType::I16)?.map(MasterWeights::Remainder),
        };
        Ok(held.unwrap_or(MasterWeights::Parameters))
    }

    fn held(&self) -> Option<(&'static str, &Held)> {
        match self {
            MasterWeights::Parameters => None,
            MasterWeights::F32(held) => Some((F32, held)),
            MasterWeights::Remainder(held) => Some((REMAINDER, held)),
        }
    }

    pub(crate) fn buffer(&self) -> Option<(&'static str, &Buffer)> {
        self.held().map(|(name, held)| (name, &held.buffer))
    }

    pub(crate) fn flat_mut(&mut self, range: &Range<usize>) -> MasterOperand<'_> {
        match self {
            MasterWeights::Parameters => MasterOperand::Parameters,
            MasterWeights::F32(held) => MasterOperand::F32(held.flat_mut(range)),
            MasterWeights::Remainder(held) => MasterOperand::Remainder(held.flat_mut(range)),
        }
    }

    /// Sets the exact weights of a range, and the parameters.
    pub(crate) fn set(
        &mut self,
        kernels: &dyn Kernels,
        parameters: &mut Arena,
        range: Range<usize>,
        values: &[f32],
    ) -> Result<(), KernelError> {
        let weights = parameters.flat_mut(range.clone());
        if weights.dtype() == DType::F32 {
            return store_f32(kernels, Space::Device, weights, values);
        }
        let (halves, remainders): (Vec<bf16>, Vec<i16>) =
            values.iter().map(|value| split(*value)).unzip();
        kernels.upload(weights, bytemuck::cast_slice(&halves))?;
        match self {
            MasterWeights::Parameters => Ok(()),
            MasterWeights::F32(held) => {
                let (space, out) = (held.space, held.flat_mut(&range));
                store_f32(kernels, space, out, values)
            }
            MasterWeights::Remainder(held) => {
                let (space, out) = (held.space, held.flat_mut(&range));
                store(kernels, space, out, bytemuck::cast_slice(&remainders))
            }
        }
    }

    /// A parameter's part of the buffer.
    pub(crate) fn named<'a>(&'a self, entry: &Entry) -> Option<NamedState<'a>> {
        let (kind, held) = self.held()?;
        Some(NamedState {
            name: state_name(entry, kind),
            view: held.flat(&entry.range()),
            space: held.space,
        })
    }

    /// Sets a parameter's exact weights from what was saved beside its parameters, which are there already. Where
    /// nothing was saved, the parameters are exact.
    pub(crate) fn restore<'s>(
        &mut self,
        kernels: &dyn Kernels,
        parameters: &mut Arena,
        entry: &Entry,
        find: &dyn Fn(&str) -> Option<SavedState<'s>>,
    ) -> Result<(), RestoreError> {
        let n = entry.elements();
        let saved = |kind: &str| find(&state_name(entry, kind));
        let values = if let Some(master) = saved(F32) {
            master.widened(entry, n)?
        } else {
            let weights = crate::download_f32(kernels, parameters.flat(entry.range()))?;
            match saved(REMAINDER) {
                None => weights,
                Some(remainder) => joined(&weights, remainder.exactly(entry, n, DType::I16)?),
            }
        };
        Ok(self.set(kernels, parameters, entry.range(), &values)?)
    }
}

/// bf16 weights, here as f32, with their little-endian remainders.
fn joined(weights: &[f32], remainders: &[u8]) -> Vec<f32> {
    let remainders = remainders
        .chunks_exact(2)
        .map(|pair| i16::from_le_bytes([pair[0], pair[1]]));
    let pairs = weights.iter().zip(remainders);
    pairs
        .map(|(weight, remainder)| join(bf16::from_f32(*weight), remainder))
        .collect()
}
