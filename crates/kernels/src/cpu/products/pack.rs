//! Operands of products, and how their tiles are packed.

use super::tiles::{DEPTH, Job, Left, OnStack, SIDE, STRIP_TILES, Square, Tiles};
use crate::cpu::Shared;
use crate::cpu::simd::Real;
use half::bf16;
use memory::{DType, In};

/// An operand by its rows. The left operand's rows are the product's rows; the right one's are its columns.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pointer: Shared<u8>,
    dtype: DType,
    pub(super) rows: usize,
    row_stride: usize,
    depth_stride: usize,
    table: Option<(TableOf, Shared<i32>)>,
    /// The values of codes; none if the elements are no codes.
    values: Option<Shared<CodeValues>>,
}

/// The value of each code of FP8 times the scale of its tensor. bf16 has all of these values exactly.
pub(in crate::cpu) type CodeValues = [bf16; 256];

/// Whether a table lists rows of the matrix in memory, or places of its depth. The operand has them in the table's order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum TableOf {
    Rows,
    Places,
}

/// Part of an operand: this many rows and places of the depth, from `row` and `place` on.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) row: usize,
    pub(super) place: usize,
    pub(super) rows: usize,
    pub(super) places: usize,
}

impl Operand {
    /// A matrix `[rows, depth]`.
    pub(super) fn of(view: In) -> Operand {
        assert!(!view.pointer().is_null(), "a shape has no data");
        Operand {
            pointer: Shared(view.pointer().cast_mut()),
            dtype: view.dtype(),
            rows: view.dims()[0],
            row_stride: view.strides()[0],
            depth_stride: view.strides()[1],
            table: None,
            values: None,
        }
    }

    /// A matrix of codes with contiguous rows, as the values that these codes have, which must outlive the operand.
    pub(super) fn of_codes(view: In, values: &CodeValues) -> Operand {
        assert!(view.dtype().is_fp8() && view.is_by_rows());
        Operand {
            values: Some(Shared(std::ptr::from_ref(values).cast_mut())),
            ..Operand::of(view)
        }
    }

    /// An operand of the rows, or the places of the depth, that `table` lists of this one.
    pub(super) fn listed(self, table: &[i32], of: TableOf) -> Operand {
        let rows = match of {
            TableOf::Rows => table.len(),
            TableOf::Places => self.rows,
        };
        let table = Shared(table.as_ptr().cast_mut());
        Operand {
            rows,
            table: Some((of, table)),
            ..self
        }
    }

    /// Whether the elements of a row lie side by side.
    pub(super) fn has_contiguous_rows(&self) -> bool {
        self.depth_stride == 1 && !matches!(self.table, Some((TableOf::Places, _)))
    }

    /// # Safety
    /// A table must list this row or place, and be live.
    #[inline(always)]
    unsafe fn at<T>(&self, row: usize, place: usize) -> *const T {
        // SAFETY: the caller's promise.
        let entry = |table: Shared<i32>, index| unsafe { *table.at(index) as usize };
        let (row, place) = match self.table {
            None => (row, place),
            Some((TableOf::Rows, table)) => (entry(table, row), place),
            Some((TableOf::Places, table)) => (row, entry(table, place)),
        };
        let first = self.pointer.at(0).cast::<T>().cast_const();
        first.wrapping_add(row * self.row_stride + place * self.depth_stride)
    }

    /// The tiles of bf16 in place, if the instructions can read them there. All tiles must be whole.
    pub(super) fn in_place<S: Tiles>(&self, part: Part) -> Option<Left> {
        let is_whole = part.rows == STRIP_TILES * SIDE && part.places.is_multiple_of(DEPTH);
        let is_plain = self.table.is_none() && self.values.is_none();
        let is_readable = S::READS_ROWS && self.has_contiguous_rows() && is_plain;
        (is_whole && is_readable).then(|| Left {
            // SAFETY: there is no table.
            pointer: unsafe { self.at::<bf16>(part.row, part.place) }.cast(),
            row: 2 * self.row_stride,
            block: 2 * DEPTH,
            tile: 2 * SIDE * self.row_stride,
            rows: part.rows,
        })
    }
}

/// Which operand a square is for. A line of the left one's is a row; the right one's is transposed.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Side {
    Left,
    Right,
}

/// Packs at most 16 rows of an operand, block by block, with zeros beyond its end.
///
/// # Safety
/// The part must lie in the operand, which must be live, and nothing else may touch the squares.
#[inline(always)]
pub(super) unsafe fn pack<S: Tiles>(operand: &Operand, part: Part, side: Side, to: *mut Square) {
    // SAFETY: the caller's promise.
    unsafe {
        match (operand.dtype, operand.values) {
            (_, Some(values)) => pack_codes::<S>(operand, &*values.at(0), part, side, to),
            (DType::F32, None) => pack_as::<S, f32>(operand, part, side, to),
            _ => pack_as::<S, bf16>(operand, part, side, to),
        }
    }
}

/// As [`pack`], for codes.
#[inline(always)]
unsafe fn pack_codes<S: Tiles>(
    operand: &Operand,
    values: &CodeValues,
    part: Part,
    side: Side,
    to: *mut Square,
) {
    for (block, start) in (0..part.places.max(1)).step_by(DEPTH).enumerate() {
        let mut patch = [bf16::ZERO; SIDE * DEPTH];
        let places = DEPTH.min(part.places - start);
        for (index, patch) in patch.chunks_exact_mut(DEPTH).take(part.rows).enumerate() {
            let first = (part.row + index, part.place + start);
            for (skipped, value) in patch[..places].iter_mut().enumerate() {
                // SAFETY: the caller's promise, and rows are contiguous.
                let code = unsafe { *operand.at::<u8>(first.0, first.1).add(skipped) };
                *value = values[usize::from(code)];
            }
        }
        // SAFETY: the patch is whole, and nothing else touches the squares.
        unsafe {
            pack_rows::<S, bf16>(
                patch.as_ptr(),
                DEPTH,
                side,
                to.wrapping_add(block * S::SQUARES),
            )
        };
    }
}

#[inline(always)]
unsafe fn pack_as<S: Tiles, T: Real>(operand: &Operand, part: Part, side: Side, to: *mut Square) {
    // A depth of 0 is one block of zeros.
    for (block, start) in (0..part.places.max(1)).step_by(DEPTH).enumerate() {
        let to = to.wrapping_add(block * S::SQUARES);
        let places = DEPTH.min(part.places - start);
        let is_whole = part.rows == SIDE && places == DEPTH;
        let (row, place) = (part.row, part.place + start);
        // SAFETY: the caller's promise; a patch is whole, and its rows or places are contiguous.
        unsafe {
            match operand.table {
                None if is_whole && operand.depth_stride == 1 => {
                    pack_rows::<S, T>(operand.at(row, place), operand.row_stride, side, to);
                }
                None if is_whole && operand.row_stride == 1 => {
                    let is_last = part.places - start == DEPTH;
                    let (first, stride) = (operand.at(row, place), operand.depth_stride);
                    pack_places::<S, T>(first, stride, side, to, is_last);
                }
                Some((TableOf::Places, _)) if is_whole && operand.row_stride == 1 => {
                    let mut patch = [T::narrow(0.0); SIDE * DEPTH];
                    for (index, patch) in patch.chunks_exact_mut(SIDE).enumerate() {
                        copy_to(patch, operand.at(row, place + index));
                    }
                    for index in (start + DEPTH..part.places).take(DEPTH) {
                        prefetch(operand.at::<T>(row, part.place + index).cast());
                    }
                    pack_places::<S, T>(patch.as_ptr(), SIDE, side, to, true);
                }
                _ => {
                    let mut patch = [T::narrow(0.0); SIDE * DEPTH];
                    for (index, patch) in patch.chunks_exact_mut(DEPTH).take(part.rows).enumerate()
                    {
                        let patch = &mut patch[..places];
                        if operand.has_contiguous_rows() && places > 0 {
                            copy_to(patch, operand.at(row + index, place));
                            continue;
                        }
                        for (skipped, value) in patch.iter_mut().enumerate() {
                            *value = *operand.at(row + index, place + skipped);
                        }
                    }
                    pack_rows::<S, T>(patch.as_ptr(), DEPTH, side, to);
                }
            }
        }
    }
}

/// Copies elements that lie side by side.
///
/// # Safety
/// As many as `to` has must be live.
#[inline(always)]
unsafe fn copy_to<T: Real>(to: &mut [T], from: *const T) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
}

/// Packs a tile whose rows are contiguous.
#[inline(always)]
unsafe fn pack_rows<S: Tiles, T: Real>(
    first: *const T,
    stride: usize,
    side: Side,
    to: *mut Square,
) {
    let mut room = OnStack::<2>::new();
    let lines = match side {
        Side::Left => to,
        Side::Right => room.pointer(),
    };
    // SAFETY: the caller's promise.
    unsafe {
        for row in 0..SIDE {
            S::along(first.wrapping_add(row * stride), lines, row);
        }
        if side == Side::Right {
            for square in 0..S::SQUARES {
                S::transpose(to.wrapping_add(square), lines.wrapping_add(square));
            }
        }
    }
}

/// Packs a tile whose rows are contiguous at each place of the depth.
#[inline(always)]
unsafe fn pack_places<S: Tiles, T: Real>(
    first: *const T,
    stride: usize,
    side: Side,
    to: *mut Square,
    is_last: bool,
) {
    // Places may be so far apart that the processor does not prefetch the next ones.
    for place in DEPTH..2 * DEPTH {
        if !is_last {
            prefetch(first.wrapping_add(place * stride).cast());
        }
    }
    let mut room = OnStack::<2>::new();
    let lines = match side {
        Side::Left => room.pointer(),
        Side::Right => to,
    };
    // SAFETY: the caller's promise.
    unsafe {
        for line in 0..SIDE * S::SQUARES {
            S::across(first, stride, lines, line);
        }
        if side == Side::Left {
            for square in 0..S::SQUARES {
                S::transpose(to.wrapping_add(square), lines.wrapping_add(square));
            }
        }
    }
}

/// Prefetches a line of memory. Harmless for an invalid address.
#[inline(always)]
pub(super) fn prefetch(place: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: the instruction never faults, and every x86-64 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(place.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// Packs a part of the right operand: some blocks of some panels.
pub(super) struct PackRight<'a> {
    pub(super) operand: &'a Operand,
    pub(super) part: Part,
    /// The first square of its first panel.
    pub(super) to: *mut Square,
    /// Squares from one panel to the next.
    pub(super) panel: usize,
}

impl Job for PackRight<'_> {
    #[inline(always)]
    fn run<S: Tiles>(self) {
        let end = self.part.row + self.part.rows;
        for (panel, row) in (self.part.row..end).step_by(SIDE).enumerate() {
            let part = Part {
                row,
                rows: SIDE.min(end - row),
                ..self.part
            };
            let to = self.to.wrapping_add(panel * self.panel);
            let side = match self.operand.rows <= S::THIN {
                true => Side::Left,
                false => Side::Right,
            };
            // SAFETY: whoever made the job saw to it that the part lies in the operand, and the squares are this task's.
            unsafe { pack::<S>(self.operand, part, side, to) };
        }
    }
}
