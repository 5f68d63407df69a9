//! The trait [`Tiles`] of a set of instructions: tiles of a fixed size, their packing, and their product.
//!
//! Every set of instructions sums in AMX's order. The depth is divided into blocks of [`DEPTH`]. In each block the
//! products of even places are added one after another from zero, and so are those of odd places. Then the sum of both
//! is added to the sum of the blocks before. A product of two bf16 is exact in f32, so fused and separate
//! multiplication give the same bits. The order depends only on the depth, not on rows, columns, threads or blocks.

use crate::cpu::simd::Real;
use half::bf16;
use std::mem::MaybeUninit;

/// Rows of a tile of either operand.
pub(super) const SIDE: usize = 16;

/// Elements of a row in a tile of either operand.
pub(super) const DEPTH: usize = 32;

/// Tiles of the left operand in a strip, one below the other.
pub(super) const STRIP_TILES: usize = 2;

/// 16 lines of 16 words: pairs of bf16, or f32.
pub(super) type Square = [[u32; SIDE]; SIDE];

/// Squares on the stack, which are written before they are read.
#[repr(C, align(64))]
pub(super) struct OnStack<const N: usize>(MaybeUninit<[Square; N]>);

impl<const N: usize> OnStack<N> {
    #[inline(always)]
    pub(super) fn new() -> OnStack<N> {
        OnStack(MaybeUninit::uninit())
    }

    #[inline(always)]
    pub(super) fn pointer(&mut self) -> *mut Square {
        self.0.as_mut_ptr().cast()
    }
}

/// Where the tiles of a strip's left operand are. Distances are in bytes.
#[derive(Clone, Copy)]
pub(super) struct Left {
    pub(super) pointer: *const u8,
    /// From one row of a tile to the next.
    pub(super) row: usize,
    /// From one block of the depth to the next.
    pub(super) block: usize,
    /// From one tile to the one below.
    pub(super) tile: usize,
    /// Rows that need sums.
    pub(super) rows: usize,
}

/// The right operand's panels, each of 16 columns: one panel's squares of all blocks, then the next one's.
#[derive(Clone, Copy)]
pub(super) struct Right {
    pub(super) pointer: *const Square,
    /// Squares from one panel to the next.
    pub(super) panel: usize,
    pub(super) panels: usize,
}

/// Instructions that multiply tiles.
///
/// A tile of 16 rows of 32 elements is [`Tiles::SQUARES`] squares of words. A line of the left operand's squares is a
/// row of the tile; the right operand's are transposed.
pub(super) trait Tiles {
    /// 1 for pairs of bf16, or 2 for f32.
    const SQUARES: usize;

    /// Whether a left operand of bf16 with contiguous rows can be read in place.
    const READS_ROWS: bool;

    /// With at most this many columns of the right operand, operands are exchanged within a strip. Then a register
    /// works on rows of the left one; the few columns would leave it half empty.
    const THIN: usize;

    /// Writes the words of 32 contiguous elements of a row into a line of each square.
    ///
    /// # Safety
    /// The elements and the lines must lie in live memory; the processor must have the instructions.
    unsafe fn along<T: Real>(row: *const T, squares: *mut Square, line: usize);

    /// Writes a line of a square: its word for 16 rows, which are contiguous at each place of the depth.
    ///
    /// # Safety
    /// As for [`Tiles::along`].
    unsafe fn across<T: Real>(
        first: *const T,
        depth_stride: usize,
        squares: *mut Square,
        line: usize,
    );

    /// Transposes a square into another.
    ///
    /// # Safety
    /// As for [`Tiles::along`].
    unsafe fn transpose(to: *mut Square, from: *const Square);

    /// Rounds sixteen sums to bf16.
    ///
    /// # Safety
    /// As for [`Tiles::along`].
    unsafe fn narrow(to: *mut [bf16; SIDE], sums: *const [f32; SIDE]);

    /// Adds the product of a strip's tiles and some panels, over a number of blocks, to f32 sums. A panel has two
    /// squares of sums, one per tile of the strip. If `fresh`, sums start from zero.
    ///
    /// # Safety
    /// As for [`Tiles::along`]; nothing else may touch the sums.
    unsafe fn multiply(sums: *mut Square, left: Left, right: Right, blocks: usize, fresh: bool);
}

/// Work that is compiled for each set of instructions. Its function must be `#[inline(always)]`, so that it becomes
/// part of a function compiled for them.
pub(super) trait Job {
    fn run<S: Tiles>(self);
}
