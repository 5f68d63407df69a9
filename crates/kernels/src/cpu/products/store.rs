//! Stores sums into the output.

use super::tiles::{SIDE, Square, Tiles};
use crate::Init;
use crate::cpu::Shared;
use crate::cpu::simd::Real;
use half::bf16;
use memory::{DType, In, Out};
use std::ops::Range;

/// The term that is added to a product's result before it is stored.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Added<'a> {
    pub(in crate::cpu) bias: Option<In<'a>>,
    pub(in crate::cpu) init: Init<'a>,
}

/// The output, and what is added to it.
#[derive(Clone, Copy)]
pub(super) struct Output<'a> {
    pointer: Shared<u8>,
    dtype: DType,
    rows: usize,
    columns: usize,
    stride: usize,
    added: Added<'a>,
    /// Whether the left operand's rows are columns of the output.
    is_turned: bool,
}

impl<'a> Output<'a> {
    pub(super) fn new(out: Out, added: Added<'a>, is_turned: bool) -> Output<'a> {
        Output {
            pointer: Shared(out.pointer()),
            dtype: out.dtype(),
            rows: out.dims()[0],
            columns: out.dims()[1],
            stride: out.strides()[0],
            added,
            is_turned,
        }
    }

    /// Some of its rows, for a product of their own. Nothing but the output itself may be added to it.
    pub(super) fn rows(&self, rows: Range<usize>) -> Output<'a> {
        assert!(rows.start <= rows.end && rows.end <= self.rows);
        let skipped = rows.start * self.stride * self.dtype.size_in_bytes();
        Output {
            pointer: Shared(self.pointer.at(skipped)),
            rows: rows.len(),
            ..*self
        }
    }

    /// Writes a tile of sums, given its first row of the left operand and of the right one. Its lines are rows of the
    /// left one, or, if `exchanged`, of the right one.
    ///
    /// # Safety
    /// The place must be in the output, and nothing else may touch it.
    #[inline(always)]
    pub(super) unsafe fn store<S: Tiles>(
        &self,
        sums: *const Square,
        left: usize,
        right: usize,
        exchanged: bool,
    ) {
        let mut turned = [[0; SIDE]; SIDE];
        let (row, column) = match self.is_turned {
            false => (left, right),
            true => (right, left),
        };
        let sums = match self.is_turned == exchanged {
            true => sums,
            false => {
                // SAFETY: both are squares.
                unsafe { S::transpose(&mut turned, sums) };
                &raw const turned
            }
        };
        // SAFETY: the caller's promise.
        unsafe {
            match self.dtype {
                DType::BF16 if self.is_plain() && self.has_whole_tile(row, column) => {
                    self.round::<S>(sums, row, column)
                }
                DType::F32 => self.store_as::<f32>(sums, row, column),
                _ => self.store_as::<bf16>(sums, row, column),
            }
        }
    }

    /// Whether sums are stored without an addition.
    fn is_plain(&self) -> bool {
        self.added.bias.is_none() && matches!(self.added.init, Init::Overwrite)
    }

    fn has_whole_tile(&self, row: usize, column: usize) -> bool {
        row + SIDE <= self.rows && column + SIDE <= self.columns
    }

    /// Rounds a whole tile into an output of bf16.
    #[inline(always)]
    unsafe fn round<S: Tiles>(&self, sums: *const Square, row: usize, column: usize) {
        let out = self.pointer.at(0).cast::<bf16>();
        let out = out.wrapping_add(row * self.stride + column);
        for line in 0..SIDE {
            let sums = sums.cast::<[f32; SIDE]>().wrapping_add(line);
            // SAFETY: the caller's promise.
            unsafe { S::narrow(out.wrapping_add(line * self.stride).cast(), sums) };
        }
    }

    #[inline(always)]
    unsafe fn store_as<T: Real>(&self, sums: *const Square, row: usize, column: usize) {
        let columns = SIDE.min(self.columns - column);
        let residual = match self.added.init {
            Init::Add(residual) => Some(residual.slice::<T>()),
            _ => None,
        };
        let accumulate = matches!(self.added.init, Init::Accumulate);
        let bias = self
            .added
            .bias
            .map(|bias| &bias.slice::<T>()[column..column + columns]);
        for line in 0..SIDE.min(self.rows - row) {
            let row = row + line;
            let out = self.pointer.at(0).cast::<T>();
            let out = out.wrapping_add(row * self.stride + column);
            // SAFETY: the caller's promise.
            let (sums, out) = unsafe {
                let sums = &*sums.cast::<[f32; SIDE]>().wrapping_add(line);
                (sums, std::slice::from_raw_parts_mut(out, columns))
            };
            let added =
                residual.map(|residual| &residual[row * self.columns + column..][..columns]);
            match <&mut [T; SIDE]>::try_from(&mut *out) {
                Ok(whole) if added.is_none() && bias.is_none() => {
                    store_line(whole, sums, accumulate)
                }
                _ => store_added(out, sums, [added, bias], accumulate),
            }
        }
    }
}

/// A whole line of the output, without other terms.
#[inline(always)]
fn store_line<T: Real>(out: &mut [T; SIDE], sums: &[f32; SIDE], accumulate: bool) {
    if accumulate {
        for index in 0..SIDE {
            out[index] = T::narrow(sums[index] + out[index].widen());
        }
    } else {
        for index in 0..SIDE {
            out[index] = T::narrow(sums[index]);
        }
    }
}

/// A line of the output with other terms, added in this order.
#[inline(always)]
fn store_added<T: Real>(
    out: &mut [T],
    sums: &[f32; SIDE],
    added: [Option<&[T]>; 2],
    accumulate: bool,
) {
    for (index, out) in out.iter_mut().enumerate() {
        let mut sum = sums[index];
        if accumulate {
            sum += out.widen();
        }
        for added in added.into_iter().flatten() {
            sum += added[index].widen();
        }
        *out = T::narrow(sum);
    }
}
