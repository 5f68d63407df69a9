//! Restores a moment's values into its states, from any saved format.

use crate::host::{store, store_f32};
use crate::saved::{Find, REAL, RestoreError, SavedState};
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

/// The moment of this name.
macro_rules! moment {
    ($name:literal, $map:ident) => {
        Moment {
            plain: $name,
            codes: concat!($name, ".codes"),
            absmax: concat!($name, ".absmax"),
            map: &$map,
        }
    };
}
pub(crate) use moment;

/// A moment of a parameter, as it was saved.
pub(crate) struct SavedMoment<'a> {
    map: &'static Map,
    /// f32 or bf16, or codes.
    values: SavedState<'a>,
    /// Of codes: one f32 per block.
    absmax: Option<SavedState<'a>>,
}

impl<'a> SavedMoment<'a> {
    pub(crate) fn find(
        moment: &Moment,
        entry: &Entry,
        find: Find<'_, 'a>,
    ) -> Result<SavedMoment<'a>, RestoreError> {
        let n = entry.elements();
        let (plain, codes) = (find(moment.plain), find(moment.codes));
        let (values, absmax) = match (plain, codes, find(moment.absmax)) {
            (Some(plain), ..) => (plain.checked(entry, n, REAL)?, None),
            (None, Some(codes), Some(absmax)) => {
                let absmax = absmax.checked(entry, n.div_ceil(BLOCK), &[DType::F32])?;
                (codes.checked(entry, n, &[DType::U8])?, Some(absmax))
            }
            _ => return Err(RestoreError::missing(entry, moment.plain)),
        };
        Ok(SavedMoment {
            map: moment.map,
            values,
            absmax,
        })
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
        match out {
            MomentOperand::Plain(out) => {
                let out = out.rows(0..elements.len());
                match out.dtype() == self.values.dtype {
                    true => store(kernels, space, out, &self.values.part(elements)?)?,
                    false => store_f32(kernels, space, out, &self.values(elements)?)?,
                }
            }
            MomentOperand::Quantised { codes, absmax } => {
                let (mut coded, scales) = match &self.absmax {
                    None => quantise(self.map, &self.values(elements)?),
                    Some(absmax) => {
                        let scales = absmax.part(&blocks(elements))?.into_owned();
                        (self.values.part(elements)?.into_owned(), scales)
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
        let Some(absmax) = &self.absmax else {
            return self.values.widened(elements);
        };
        let (codes, scales) = (
            self.values.part(elements)?,
            absmax.widened(&blocks(elements))?,
        );
        let mut values = vec![0.0; codes.len()];
        let blocks = values.chunks_mut(BLOCK).zip(codes.chunks(BLOCK));
        for ((values, codes), absmax) in blocks.zip(scales) {
            self.map.dequantise(codes, absmax, values);
        }
        Ok(values)
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
