//! The exact weights behind the parameters, in their format.

use crate::MasterFormat;
use crate::named::{NamedState, RestoreError, SavedState, state_name, upload_f32};
use half::bf16;
use kernels::split::{join, split};
use kernels::{KernelError, Kernels};
use memory::{Arena, Category, DType, Entry, Layout, Memory, OutOfMemory};
use std::ops::Range;
use std::rc::Rc;

/// The arena beside the parameters, if there is one.
pub(crate) enum Master {
    /// The parameters are all there is.
    Parameters,
    F32(Arena),
    Remainder(Arena),
}

const F32: &str = "master";
const REMAINDER: &str = "remainder";

impl Master {
    pub(crate) fn lease(
        memory: &Memory,
        layout: &Rc<Layout>,
        format: MasterFormat,
        weights: DType,
    ) -> Result<Master, OutOfMemory> {
        let lease =
            |name, dtype| Arena::lease(memory, Category::OptimizerState, name, layout, dtype);
        Ok(match format {
            _ if weights == DType::F32 => Master::Parameters,
            MasterFormat::None => Master::Parameters,
            MasterFormat::F32 => Master::F32(lease(F32, DType::F32)?),
            MasterFormat::Remainder => Master::Remainder(lease(REMAINDER, DType::I16)?),
        })
    }

    pub(crate) fn arena(&self) -> Option<(&'static str, &Arena)> {
        match self {
            Master::Parameters => None,
            Master::F32(arena) => Some((F32, arena)),
            Master::Remainder(arena) => Some((REMAINDER, arena)),
        }
    }

    pub(crate) fn flat_mut(&mut self, range: Range<usize>) -> kernels::Master<'_> {
        match self {
            Master::Parameters => kernels::Master::Parameters,
            Master::F32(arena) => kernels::Master::F32(arena.flat_mut(range)),
            Master::Remainder(arena) => kernels::Master::Remainder(arena.flat_mut(range)),
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
            return upload_f32(kernels, weights, values);
        }
        let (halves, remainders): (Vec<bf16>, Vec<i16>) =
            values.iter().map(|value| split(*value)).unzip();
        kernels.upload(weights, bytemuck::cast_slice(&halves))?;
        match self {
            Master::Parameters => Ok(()),
            Master::F32(arena) => upload_f32(kernels, arena.flat_mut(range), values),
            Master::Remainder(arena) => {
                kernels.upload(arena.flat_mut(range), bytemuck::cast_slice(&remainders))
            }
        }
    }

    /// A parameter's part of the arena.
    pub(crate) fn named<'a>(&'a self, entry: &Entry) -> Option<NamedState<'a>> {
        let (kind, arena) = self.arena()?;
        Some(NamedState {
            name: state_name(entry, kind),
            view: arena.flat(entry.range()),
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
