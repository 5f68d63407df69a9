//! Restores a moment's values into its states, from any saved format.

use crate::host::{store, store_f32};
use crate::saved::{RestoreError, SavedState, state_name};
use files::FilesError;
use kernels::quantise::{BLOCK, Map};
use kernels::{Kernels, MomentOperand};
use memory::{DType, Entry, Space};
use std::ops::Range;

/// A moment: an average with one element per parameter. Has the names of its states in each format, and its map of
/// codes.
pub(crate) struct Moment {
    pub(crate) plain: &'static str,
    pub(crate) codes: &'static str,
    pub(crate) absmax: &'static str,
    pub(crate) map: &'static Map,
}

/// A moment of a parameter, as it was saved.
pub(crate) struct SavedMoment<'a> {
    map: &'static Map,
    values: SavedValues<'a>,
}

enum SavedValues<'a> {
    /// f32 or bf16.
    Plain(SavedState<'a>),
    /// One code per element, and one f32 per block.
    Quantised {
        codes: SavedState<'a>,
        absmax: SavedState<'a>,
    },
}

impl<'a> SavedMoment<'a> {
    pub(crate) fn find(
        moment: &Moment,
        entry: &Entry,
        find: &dyn Fn(&str) -> Option<SavedState<'a>>,
    ) -> Result<SavedMoment<'a>, RestoreError> {
        let n = entry.elements();
        let find = |kind: &str| find(&state_name(entry, kind));
        let Moment {
            plain,
            codes,
            absmax,
            map,
        } = *moment;
        let values = match (find(plain), find(codes), find(absmax)) {
            (Some(plain), ..) => SavedValues::Plain(plain.real(entry, n)?),
            (None, Some(codes), Some(absmax)) => {
                let absmax = absmax.exactly(entry, n.div_ceil(BLOCK), DType::F32)?;
                let codes = codes.exactly(entry, n, DType::U8)?;
                SavedValues::Quantised { codes, absmax }
            }
            _ => return Err(RestoreError::missing(entry, plain)),
        };
        Ok(SavedMoment { map, values })
    }

    /// Sets the states of some of the parameter's elements, which begin with a block, and of the padding behind them.
    /// Values saved in the same format are copied; others are converted through f32.
    pub(crate) fn store(
        &self,
        kernels: &Kernels,
        space: Space,
        out: MomentOperand,
        elements: &Range<usize>,
    ) -> Result<(), RestoreError> {
        match (out, &self.values) {
            (MomentOperand::Plain(out), SavedValues::Plain(saved))
                if out.dtype() == saved.dtype =>
            {
                let out = out.rows(0..elements.len());
                store(kernels, space, out, &saved.part(elements)?)?;
            }
            (MomentOperand::Plain(out), _) => {
                let out = out.rows(0..elements.len());
                store_f32(kernels, space, out, &self.values(elements)?)?;
            }
            (MomentOperand::Quantised { codes, absmax }, saved) => {
                let (mut coded, scales) = match saved {
                    SavedValues::Plain(_) => quantise(self.map, &self.values(elements)?),
                    SavedValues::Quantised { codes, absmax } => {
                        let scales = absmax.part(&blocks(elements))?.into_owned();
                        (codes.part(elements)?.into_owned(), scales)
                    }
                };
                // The code of zero, which is not the number 0 in the first moment.
                coded.resize(codes.elements(), self.map.zero);
                store(kernels, space, codes, &coded)?;
                store(kernels, space, absmax, &scales)?;
            }
        }
        Ok(())
    }

    fn values(&self, elements: &Range<usize>) -> Result<Vec<f32>, FilesError> {
        match &self.values {
            SavedValues::Plain(saved) => saved.widened(elements),
            SavedValues::Quantised { codes, absmax } => {
                let scales = absmax.widened(&blocks(elements))?;
                Ok(dequantise(self.map, &codes.part(elements)?, &scales))
            }
        }
    }
}

/// The blocks of a range of elements that begins with a block.
fn blocks(elements: &Range<usize>) -> Range<usize> {
    elements.start / BLOCK..elements.end.div_ceil(BLOCK)
}

/// The codes of values, and the bytes of the blocks' scales.
fn quantise(map: &Map, values: &[f32]) -> (Vec<u8>, Vec<u8>) {
    let mut codes = vec![0; values.len()];
    let blocks = values.chunks(BLOCK).zip(codes.chunks_mut(BLOCK));
    let absmax: Vec<f32> = blocks
        .map(|(values, codes)| map.quantise(values, codes))
        .collect();
    (codes, bytemuck::cast_slice(&absmax).to_vec())
}

/// The values of codes, with one scale per block.
fn dequantise(map: &Map, codes: &[u8], absmax: &[f32]) -> Vec<f32> {
    let mut values = vec![0.0; codes.len()];
    let blocks = values.chunks_mut(BLOCK).zip(codes.chunks(BLOCK));
    for ((values, codes), absmax) in blocks.zip(absmax) {
        map.dequantise(codes, *absmax, values);
    }
    values
}
