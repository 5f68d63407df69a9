//! One moment of all parameters, in its format.

use crate::MomentFormat;
use crate::named::{NamedState, RestoreError, SavedState, state_name, upload_f32};
use kernels::quantise::{BLOCK, Map};
use kernels::{KernelError, Kernels};
use memory::{Buffer, Category, DType, Entry, In, Layout, Memory, OutOfMemory};
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

/// A moment's arenas.
pub(crate) struct Moment {
    kind: &'static Kind,
    /// What is not quantised, in the layout's order: f32 or bf16.
    plain: Option<Buffer>,
    /// Codes and the largest magnitude of each block.
    quantised: Option<(Buffer, Buffer)>,
    /// The elements that are quantised.
    range: Range<usize>,
}

impl Moment {
    pub(crate) fn lease(
        memory: &Memory,
        layout: &Layout,
        format: MomentFormat,
        kind: &'static Kind,
    ) -> Result<Moment, OutOfMemory> {
        let range = match format {
            MomentFormat::Quantised => layout.quantisable(),
            MomentFormat::F32 | MomentFormat::Bf16 => 0..0,
        };
        let dtype = match format {
            MomentFormat::Bf16 => DType::BF16,
            MomentFormat::F32 | MomentFormat::Quantised => DType::F32,
        };
        let lease = |name, elements: usize, dtype| {
            let leased =
                || memory.lease_persistent(Category::OptimizerState, name, [elements], dtype);
            (elements > 0).then(leased).transpose()
        };
        let codes = lease(kind.codes, range.len(), DType::U8)?;
        let absmax = lease(kind.absmax, range.len() / BLOCK, DType::F32)?;
        Ok(Moment {
            kind,
            plain: lease(kind.plain, layout.elements() - range.len(), dtype)?,
            quantised: codes.zip(absmax),
            range,
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

    /// Where a range lies in the buffer of plain values; none if it is quantised.
    fn plain_rows(&self, range: &Range<usize>) -> Option<Range<usize>> {
        if self.range.contains(&range.start) && !range.is_empty() {
            return None;
        }
        let before = if range.start < self.range.end {
            0
        } else {
            self.range.len()
        };
        Some(range.start - before..range.end - before)
    }

    /// Codes and blocks of a range, if it is quantised.
    fn quantised_rows(&self, range: &Range<usize>) -> (Range<usize>, Range<usize>) {
        let [start, end] = [range.start, range.end].map(|at| at.saturating_sub(self.range.start));
        let rows = start..end;
        let blocks = rows.start / BLOCK..rows.end.div_ceil(BLOCK);
        (rows, blocks)
    }

    /// A range of the layout that is quantised as a whole or not at all.
    pub(crate) fn flat_mut(&mut self, range: Range<usize>) -> kernels::Moment<'_> {
        let plain_rows = self.plain_rows(&range);
        let (codes_rows, blocks) = self.quantised_rows(&range);
        match (plain_rows, &mut self.plain, &mut self.quantised) {
            (Some(rows), Some(plain), _) => kernels::Moment::Plain(plain.view_mut().rows(rows)),
            (None, _, Some((codes, absmax))) => kernels::Moment::Quantised {
                codes: codes.view_mut().rows(codes_rows),
                absmax: absmax.view_mut().rows(blocks),
            },
            _ => unreachable!("what is not plain is quantised"),
        }
    }

    /// A parameter's part of each arena, under the parameter's name.
    pub(crate) fn named<'a>(&'a self, entry: &Entry) -> Vec<NamedState<'a>> {
        let state = |kind: &str, view: In<'a>| NamedState {
            name: state_name(entry, kind),
            view,
        };
        let plain_rows = self.plain_rows(&entry.range());
        let (codes_rows, blocks) = self.quantised_rows(&entry.range());
        match (plain_rows, &self.plain, &self.quantised) {
            (Some(rows), Some(plain), _) => vec![state(self.kind.plain, plain.view().rows(rows))],
            (None, _, Some((codes, absmax))) => vec![
                state(self.kind.codes, codes.view().rows(codes_rows)),
                state(self.kind.absmax, absmax.view().rows(blocks)),
            ],
            _ => unreachable!("what is not plain is quantised"),
        }
    }

    /// Sets a parameter's part from f32 values: bf16 are rounded to nearest, codes to the nearest entry.
    fn set(
        &mut self,
        kernels: &dyn Kernels,
        entry: &Entry,
        values: &[f32],
    ) -> Result<(), KernelError> {
        match self.flat_mut(entry.range()) {
            kernels::Moment::Plain(out) => upload_f32(kernels, out, values),
            kernels::Moment::Quantised { .. } => {
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
        match self.flat_mut(entry.padded_range()) {
            kernels::Moment::Plain(_) => unreachable!("this parameter's moments are quantised"),
            kernels::Moment::Quantised {
                codes: out,
                absmax: scales,
            } => {
                kernels.upload(out, &codes)?;
                kernels.upload(scales, absmax)
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
        let n = entry.elements();
        if let Some(saved) = find(self.kind.plain) {
            match self.flat_mut(entry.range()) {
                kernels::Moment::Plain(out) if out.dtype() == saved.dtype => {
                    kernels.upload(out, saved.exactly(entry, n, saved.dtype)?)?;
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
        match self.flat_mut(entry.range()) {
            kernels::Moment::Quantised { .. } => {
                self.set_codes(kernels, entry, codes.to_vec(), absmax_bytes)?;
            }
            kernels::Moment::Plain(_) => {
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
