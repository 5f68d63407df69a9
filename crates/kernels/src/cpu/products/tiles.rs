//! What a set of instructions has to offer: tiles of a fixed size, packed as it wants them, and their product.
//!
//! The order of every sum is that of AMX, whatever the instructions: the depth is taken in blocks of [`DEPTH`]; in each
//! the products of even places are added up one after another from zero, those of odd places too, and the sum of both
//! is added to what the blocks before gave. A product of two bf16 is exact in f32, so fused and separate multiplication
//! give the same bits. The order depends on the depth alone: not on rows, columns, threads or blocks.

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

/// Where the tiles of a strip's left operand are, as bytes.
#[derive(Clone, Copy)]
pub(super) struct Left {
    pub(super) pointer: *const u8,
    /// From a row of a tile to the next.
    pub(super) row: usize,
    /// From a block of the depth to the next.
    pub(super) block: usize,
    /// From a tile to the one below.
    pub(super) tile: usize,
    /// Rows that need sums.
    pub(super) rows: usize,
}

/// The right operand's panels, each of 16 columns: one panel's squares of all blocks, then the next one's.
#[derive(Clone, Copy)]
pub(super) struct Right {
    pub(super) pointer: *const Square,
    /// Squares from a panel to the next.
    pub(super) panel: usize,
    pub(super) panels: usize,
}

/// Instructions that multiply tiles.
///
/// A tile of 16 rows of 32 elements is [`Tiles::SQUARES`] squares of words. The left operand's squares have a row of the
/// tile a line; the right operand's are transposed.
pub(super) trait Tiles {
    /// One, of pairs of bf16, or two, of f32.
    const SQUARES: usize;

    /// Whether the left operand may stay where it is, if it is bf16 whose rows are contiguous.
    const READS_ROWS: bool;

    /// Up to so many columns of the right operand, operands change places within a strip: rows of the left one are then
    /// worked on side by side in a register, which those few columns would leave half empty.
    const THIN: usize;

    /// Writes the words of 32 contiguous elements of a row into a line of each square.
    ///
    /// # Safety
    /// The elements and the lines must lie in live memory; the processor must have the instructions.
    unsafe fn along<T: Real>(row: *const T, squares: *mut Square, line: usize);

    /// Writes a line of a square: its word of 16 rows that are contiguous at each place of the depth.
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

    /// Adds the product of a strip's tiles and some panels, over a number of blocks, to f32 sums: two squares a panel, one
    /// for each of the strip's tiles. Sums that are `fresh` start from zero.
    ///
    /// # Safety
    /// As for [`Tiles::along`]; nothing else may touch the sums.
    unsafe fn multiply(sums: *mut Square, left: Left, right: Right, blocks: usize, fresh: bool);
}

/// Work compiled for each set of instructions. Its function must be `#[inline(always)]`, to end up in one that was compiled
/// for them.
pub(super) trait Job {
    fn run<S: Tiles>(self);
}
