//! Products of packed tiles on vector registers.

use super::tiles::{Left, Right, SIDE, STRIP_TILES, Square};

/// Blocks of the depth whose part of the right operand stays in the first-level cache.
const CACHED_BLOCKS: usize = 4;

/// 16 sums.
pub(super) trait Vector: Copy {
    fn zero() -> Self;

    /// # Safety
    /// Sixteen words must lie there; the processor must have the instructions. So for the functions below.
    unsafe fn load(from: *const u32) -> Self;

    unsafe fn store(self, to: *mut u32);

    unsafe fn add(self, other: Self) -> Self;

    /// Adds the products of a word of the left operand and a line of the right one.
    unsafe fn add_product(self, left: *const u32, right: Self) -> Self;
}

/// Adds a strip's products with `P` panels to their sums. The sums of `ROWS` rows at a time are in registers.
///
/// # Safety
/// As for `Tiles::multiply`.
#[inline(always)]
unsafe fn multiply_panels<V: Vector, const SQUARES: usize, const P: usize, const ROWS: usize>(
    sums: [*mut Square; P],
    left: Left,
    right: [*const Square; P],
    blocks: usize,
    fresh: bool,
) {
    for first in (0..blocks).step_by(CACHED_BLOCKS) {
        let blocks = CACHED_BLOCKS.min(blocks - first);
        let right = right.map(|right| right.wrapping_add(first * SQUARES).cast::<u32>());
        for row in (0..left.rows).step_by(ROWS) {
            let (tile, row) = (row / SIDE, row % SIDE);
            let left = left
                .pointer
                .wrapping_add(tile * left.tile + first * left.block);
            let left = left.cast::<u32>().wrapping_add(row * SIDE);
            let sums = sums.map(|sums| sums.wrapping_add(tile).cast::<u32>());
            let sums = sums.map(|sums| sums.wrapping_add(row * SIDE));
            // SAFETY: the caller's promise.
            unsafe {
                multiply_rows::<V, SQUARES, P, ROWS>(
                    sums,
                    left,
                    right,
                    blocks,
                    fresh && first == 0,
                );
            }
        }
    }
}

/// Some rows of [`multiply_panels`].
///
/// # Safety
/// As for `Tiles::multiply`.
#[inline(always)]
unsafe fn multiply_rows<V: Vector, const SQUARES: usize, const P: usize, const ROWS: usize>(
    sums: [*mut u32; P],
    left: *const u32,
    right: [*const u32; P],
    blocks: usize,
    fresh: bool,
) {
    const WORDS: usize = SIDE * SIDE;
    // A chain is half of a square of pairs, or a whole square of f32.
    let chain_words = SIDE * SQUARES / 2;
    let left_chain = [chain_words, WORDS][SQUARES - 1];
    // SAFETY: the caller's promise.
    unsafe {
        let mut totals = [[V::zero(); P]; ROWS];
        if !fresh {
            for (row, totals) in totals.iter_mut().enumerate() {
                for panel in 0..P {
                    totals[panel] = V::load(sums[panel].wrapping_add(row * SIDE));
                }
            }
        }
        for block in 0..blocks {
            let mut chains = [[[V::zero(); P]; ROWS]; 2];
            for (chain, chains) in chains.iter_mut().enumerate() {
                let left = left.wrapping_add(block * SQUARES * WORDS + chain * left_chain);
                let line = block * SQUARES * WORDS + chain * chain_words * SIDE;
                for word in 0..chain_words {
                    let mut lines = [V::zero(); P];
                    for panel in 0..P {
                        lines[panel] = V::load(right[panel].wrapping_add(line + word * SIDE));
                    }
                    for (row, chains) in chains.iter_mut().enumerate() {
                        let left = left.wrapping_add(row * SIDE + word);
                        for panel in 0..P {
                            chains[panel] = chains[panel].add_product(left, lines[panel]);
                        }
                    }
                }
            }
            for row in 0..ROWS {
                for panel in 0..P {
                    let both = chains[0][row][panel].add(chains[1][row][panel]);
                    totals[row][panel] = totals[row][panel].add(both);
                }
            }
        }
        for (row, totals) in totals.iter().enumerate() {
            for panel in 0..P {
                totals[panel].store(sums[panel].wrapping_add(row * SIDE));
            }
        }
    }
}

/// [`Tiles::multiply`](super::tiles::Tiles::multiply) with `PANELS` panels and four rows at a time, and `SINGLE_ROWS` with the
/// last panel of an odd number.
///
/// # Safety
/// As for `Tiles::multiply`; the processor must have the instructions.
#[inline(always)]
pub(super) unsafe fn multiply<
    V: Vector,
    const SQUARES: usize,
    const PANELS: usize,
    const SINGLE_ROWS: usize,
>(
    sums: *mut Square,
    left: Left,
    right: Right,
    blocks: usize,
    fresh: bool,
) {
    let sums_of = |panel| sums.wrapping_add(STRIP_TILES * panel);
    let panel_of = |panel| right.pointer.wrapping_add(panel * right.panel);
    let whole = right.panels / PANELS * PANELS;
    for panel in (0..whole).step_by(PANELS) {
        let places: [usize; PANELS] = std::array::from_fn(|place| panel + place);
        let (sums, panels) = (places.map(sums_of), places.map(panel_of));
        // SAFETY: the caller's promise.
        unsafe { multiply_panels::<V, SQUARES, PANELS, 4>(sums, left, panels, blocks, fresh) };
    }
    for panel in whole..right.panels {
        let (sums, panels) = ([sums_of(panel)], [panel_of(panel)]);
        // SAFETY: the caller's promise.
        unsafe { multiply_panels::<V, SQUARES, 1, SINGLE_ROWS>(sums, left, panels, blocks, fresh) };
    }
}
