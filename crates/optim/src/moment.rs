//! One moment of all parameters, in its format.

use crate::MomentFormat;
use crate::cover::Cover;
use crate::named::{NamedState, RestoreError, SavedState, state_name};
use crate::storage::{Storage, store, store_f32};
use kernels::quantise::{BLOCK, Map};
use kernels::{KernelError, Kernels, MomentOperand};
use memory::{Buffer, DType, Entry, In, OutOfMemory, Space};
use std::ops::Range;

/// What a moment and its arenas are called, and its map of codes.
pub(crate) struct Kind {
    pub(crate) plain: &'static str,
    pub(crate) codes: &'static str,
    pub(crate) absmax: &'static str,
    pub(crate) map: &'static Map,
}

/// The average of gradients.
pub(crate) static FIRST: Kind = Kind {
    plain: "first_moment",
    codes: "first_moment.codes",
    absmax: "first_moment.absmax",
    map: &kernels::quantise::SIGNED,
};

/// The average of squared gradients.
pub(crate) static SECOND: Kind = Kind {
    plain: "second_moment",
    codes: "second_moment.codes",
    absmax: "second_moment.absmax",
    map: &kernels::quantise::UNSIGNED,
};

/// A moment's buffers.
pub(crate) struct MomentBuffers {
    kind: &'static Kind,
    space: Space,
    /// f32 or bf16 of what is not quantised.
    plain: Option<Buffer>,
    plain_cover: Cover,
    /// Codes, and the largest magnitude of each block, of what is.
    quantised: Option<(Buffer, Buffer)>,
    quantised_cover: Cover,
}

impl MomentBuffers {
    pub(crate) fn lease(
        storage: Storage,
        plain_cover: &Cover,
        quantised_cover: &Cover,
        format: MomentFormat,
        kind: &'static Kind,
    ) -> Result<MomentBuffers, OutOfMemory> {
        let dtype = match format {
            MomentFormat::Bf16 => DType::BF16,
            MomentFormat::F32 | MomentFormat::Quantised => DType::F32,
        };
        let quantised = quantised_cover.elements();
        let codes = storage.lease(kind.codes, quantised, DType::U8)?;
        let absmax = storage.lease(kind.absmax, quantised / BLOCK, DType::F32)?;
        Ok(MomentBuffers {
            kind,
            space: storage.space,
            plain: storage.lease(kind.plain, plain_cover.elements(), dtype)?,
            plain_cover: plain_cover.clone(),
            quantised: codes.zip(absmax),
            quantised_cover: quantised_cover.clone(),
        })
    }

    pub(crate) fn buffers(&self) -> impl Iterator<Item = (&'static str, &Buffer)> {
        let (codes, absmax) = self
            .quantised
            .as_ref()
            .map(|(codes, absmax)| (codes, absmax))
            .unzip();
        let named = [
            (self.kind.plain, self.plain.as_ref()),
            (self.kind.codes, codes),
            (self.kind.absmax, absmax),
        ];
        named
            .into_iter()
            .filter_map(|(name, buffer)| Some((name, buffer?)))
    }

    /// Codes and blocks of a range that is quantised.
    fn quantised_rows(&self, range: &Range<usize>) -> Option<(Range<usize>, Range<usize>)> {
        let rows = self.quantised_cover.rows(range)?;
        let blocks = rows.start / BLOCK..rows.end.div_ceil(BLOCK);
        Some((rows, blocks))
    }

    /// A range that is quantised as a whole or not at all.
    pub(crate) fn flat_mut(&mut self, range: &Range<usize>) -> MomentOperand<'_> {
        let plain_rows = self.plain_cover.rows(range);
        let quantised_rows = self.quantised_rows(range);
        match (
            plain_rows,
            quantised_rows,
            &mut self.plain,
            &mut self.quantised,
        ) {
            (Some(rows), _, Some(plain), _) => MomentOperand::Plain(plain.view_mut().rows(rows)),
            (_, Some((rows, blocks)), _, Some((codes, absmax))) => MomentOperand::Quantised {
                codes: codes.view_mut().rows(rows),
                absmax: absmax.view_mut().rows(blocks),
            },
            _ => unreachable!("whoever asks for states asks where they are held"),
        }
    }

    /// A parameter's part of each buffer, under the parameter's name.
    pub(crate) fn named<'a>(&'a self, entry: &Entry) -> Vec<NamedState<'a>> {
        let state = |kind: &str, view: In<'a>| NamedState {
            name: state_name(entry, kind),
            view,
            space: self.space,
        };
        let plain_rows = self.plain_cover.rows(&entry.range());
        let quantised_rows = self.quantised_rows(&entry.range());
        match (plain_rows, quantised_rows, &self.plain, &self.quantised) {
            (Some(rows), _, Some(plain), _) => {
                vec![state(self.kind.plain, plain.view().rows(rows))]
            }
            (_, Some((rows, blocks)), _, Some((codes, absmax))) => vec![
                state(self.kind.codes, codes.view().rows(rows)),
                state(self.kind.absmax, absmax.view().rows(blocks)),
            ],
            _ => unreachable!("whoever asks for states asks where they are held"),
        }
    }

    /// Sets a parameter's part from f32 values: bf16 are rounded to nearest, codes to the nearest entry.
    fn set(
        &mut self,
        kernels: &dyn Kernels,
        entry: &Entry,
        values: &[f32],
    ) -> Result<(), KernelError> {
        let space = self.space;
        match self.flat_mut(&entry.range()) {
            MomentOperand::Plain(out) => store_f32(kernels, space, out, values),
            MomentOperand::Quantised { .. } => {
                let map = self.kind.map;
                let mut codes = vec![0; values.len()];
                let blocks = values.chunks(BLOCK).zip(codes.chunks_mut(BLOCK));
                let absmax: Vec<f32> = blocks
                    .map(|(values, codes)| map.quantise(values, codes))
                    .collect();
                self.set_codes(kernels, entry, codes, bytemuck::cast_slice(&absmax))
            }
        }
    }

    /// Sets a parameter's codes and the bytes of their scales. The padding behind them becomes zero: a code of its own.
    fn set_codes(
        &mut self,
        kernels: &dyn Kernels,
        entry: &Entry,
        mut codes: Vec<u8>,
        absmax: &[u8],
    ) -> Result<(), KernelError> {
        codes.resize(entry.padded_range().len(), self.kind.map.zero);
        let space = self.space;
        match self.flat_mut(&entry.padded_range()) {
            MomentOperand::Plain(_) => {
                unreachable!("this parameter's moments are quantised")
            }
            MomentOperand::Quantised {
                codes: out,
                absmax: scales,
            } => {
                store(kernels, space, out, &codes)?;
                store(kernels, space, scales, absmax)
            }
        }
    }

    /// Sets a parameter's part from what was saved: bit by bit if it has this format, else through f32.
    pub(crate) fn restore<'s>(
        &mut self,
        kernels: &dyn Kernels,
        entry: &Entry,
        find: &dyn Fn(&str) -> Option<SavedState<'s>>,
    ) -> Result<(), RestoreError> {
        let find = |kind: &str| find(&state_name(entry, kind));
        let (n, space) = (entry.elements(), self.space);
        if let Some(saved) = find(self.kind.plain) {
            match self.flat_mut(&entry.range()) {
                MomentOperand::Plain(out) if out.dtype() == saved.dtype => {
                    store(kernels, space, out, saved.exactly(entry, n, saved.dtype)?)?;
                }
                _ => self.set(kernels, entry, &saved.widened(entry, n)?)?,
            }
            return Ok(());
        }
        let (Some(codes), Some(absmax)) = (find(self.kind.codes), find(self.kind.absmax)) else {
            return Err(RestoreError::missing(entry, self.kind.plain));
        };
        let codes = codes.exactly(entry, n, DType::U8)?;
        let absmax_bytes = absmax.exactly(entry, n.div_ceil(BLOCK), DType::F32)?;
        match self.flat_mut(&entry.range()) {
            MomentOperand::Quantised { .. } => {
                self.set_codes(kernels, entry, codes.to_vec(), absmax_bytes)?;
            }
            MomentOperand::Plain(_) => {
                let absmax = absmax.widened(entry, n.div_ceil(BLOCK))?;
                self.set(kernels, entry, &dequantise(self.kind.map, codes, &absmax))?;
            }
        }
        Ok(())
    }
}

/// The values of codes, with one scale for each block.
fn dequantise(map: &Map, codes: &[u8], absmax: &[f32]) -> Vec<f32> {
    let mut values = vec![0.0; codes.len()];
    let blocks = values.chunks_mut(BLOCK).zip(codes.chunks(BLOCK));
    for ((values, codes), absmax) in blocks.zip(absmax) {
        map.dequantise(codes, *absmax, values);
    }
    values
}
