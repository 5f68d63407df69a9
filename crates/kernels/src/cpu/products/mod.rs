//! Products with bf16 operands, by the best instructions that the processor has.
//!
//! One operand is the left one; AMX reads its tiles in place. All threads pack the other into the workspace, at most
//! [`RIGHT_PANELS`] panels of 16 columns at a time. Then each thread takes strips of 32 rows of the left operand, and
//! packs on its stack those that cannot be read in place. It multiplies a strip by all panels and stores the sums. The
//! choice of the left operand and the block sizes change no bit: see [`tiles`].
//!
//! [`grouped`] runs the products of several experts at a time, each with a part of the workspace.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
mod grouped;
mod instructions;
mod multiply;
mod pack;
mod store;
mod tiles;
mod vectors;
mod words;

use super::Shared;
use crate::Init;
use memory::{In, Out};
pub(super) use pack::CodeValues;
use pack::{Operand, PackRight, Part, Side, pack};
use rayon::prelude::*;
use std::ops::Range;
use store::Output;
use tiles::{DEPTH, Job, Left, OnStack, Right, SIDE, STRIP_TILES, Square, Tiles};

pub(super) use grouped::{matrix_of, multiply_by_expert, multiply_gradients, rows_of};
pub use instructions::Instructions;
pub(super) use store::Added;

/// Squares of the workspace.
const WORKSPACE: usize = crate::workspace::CPU_WORKSPACE / (SIDE * SIDE);

/// Panels of the right operand that are packed at a time.
const RIGHT_PANELS: usize = 32;

/// Rows of a strip.
const STRIP: usize = STRIP_TILES * SIDE;

/// Blocks of the depth for which a strip is multiplied by all panels. The strip's part of them stays in the first-level
/// cache.
const LEFT_BLOCKS: usize = 16;

/// Products with fewer multiplications run in the calling thread.
const SMALL: usize = 1 << 14;

/// `out = init + a b + bias`, if some operands are not f32.
pub(super) fn multiply(
    out: Out,
    operands: [In; 2],
    added: Added,
    workspace: &mut [f32],
    instructions: Instructions,
) {
    product(out, operands, added, workspace, instructions).run();
}

/// `out = init + a b' + bias` for codes `a [m, k]` and `b [n, k]` with these values.
pub(super) fn multiply_codes(
    out: Out,
    [a, b]: [(In, &CodeValues); 2],
    added: Added,
    workspace: &mut [f32],
    instructions: Instructions,
) {
    let instructions = instructions.of([a.0, b.0]);
    let [left, right] = [a, b].map(|(codes, values)| Operand::of_codes(codes, values));
    let (out, depth) = (Output::new(out, added, false), a.0.dims()[1]);
    let room = PackedSquares::all(workspace);
    Product::new([left, right], depth, out, room, instructions).run();
}

/// `out = x x'`, if not both are f32. The bits are those of the whole product, since a sum has the same order on both
/// sides of the diagonal.
pub(super) fn multiply_by_itself(
    out: Out,
    x: In,
    workspace: &mut [f32],
    instructions: Instructions,
) {
    let added = Added {
        bias: None,
        init: Init::Overwrite,
    };
    let product = Product {
        is_symmetric: true,
        ..product(out, [x, x.t()], added, workspace, instructions)
    };
    product.run();
}

fn product<'a>(
    out: Out,
    [a, b]: [In; 2],
    added: Added<'a>,
    workspace: &mut [f32],
    instructions: Instructions,
) -> Product<'a> {
    let (m, n) = (a.dims()[0], b.dims()[1]);
    let instructions = instructions.of([a, b]);
    let [rows, columns] = [a, b.t()].map(Operand::of);
    // Reading in place saves more for the larger operand.
    let is_turned = match (rows.has_contiguous_rows(), columns.has_contiguous_rows()) {
        (true, false) => false,
        (false, true) => true,
        _ => n > m,
    };
    let (left, right) = match is_turned {
        false => (rows, columns),
        true => (columns, rows),
    };
    let out = Output::new(out, added, is_turned);
    let workspace = PackedSquares::all(workspace);
    Product::new([left, right], a.dims()[1], out, workspace, instructions)
}

/// Squares of the workspace for the packed panels of one product and for its sums.
#[derive(Clone, Copy)]
struct PackedSquares {
    first: Shared<Square>,
    squares: usize,
}

impl PackedSquares {
    fn all(workspace: &mut [f32]) -> PackedSquares {
        assert!(workspace.len() >= WORKSPACE * SIDE * SIDE);
        PackedSquares {
            first: Shared(workspace.as_mut_ptr().cast()),
            squares: WORKSPACE,
        }
    }

    fn part(self, squares: Range<usize>) -> PackedSquares {
        assert!(squares.end <= self.squares);
        PackedSquares {
            first: Shared(self.first.at(squares.start)),
            squares: squares.len(),
        }
    }
}

/// A product, with its operands given by rows.
struct Product<'a> {
    left: Operand,
    right: Operand,
    depth: usize,
    out: Output<'a>,
    instructions: Instructions,
    is_parallel: bool,
    /// Whether tiles above the diagonal are copied from those below it.
    is_symmetric: bool,
    room: PackedSquares,
}

/// How a product is divided: panels of the right operand, strips of the left one, blocks of the depth.
#[derive(Debug, PartialEq)]
struct Cut {
    panels: usize,
    strips: usize,
    blocks: usize,
}

impl Cut {
    /// Takes panels of the whole depth if enough of them fit, so that no sums need to be kept. Otherwise half of the
    /// room is for sums.
    fn new(panels: usize, strips: usize, blocks: usize, squares: usize, room: usize) -> Cut {
        let fit = room / (blocks * squares).max(1);
        let enough = RIGHT_PANELS.min(panels);
        if fit >= enough.div_ceil(2) {
            return Cut {
                panels: fit.min(enough),
                strips,
                blocks,
            };
        }
        Cut {
            panels: enough,
            strips: room / 2 / kept_squares(enough),
            blocks: room / 2 / (enough * squares),
        }
    }
}

/// Squares for a strip's sums: one per tile of the strip and panel. A single panel may be exchanged with the strip,
/// whose tiles are then two panels.
fn kept_squares(panels: usize) -> usize {
    STRIP_TILES * panels.max(STRIP_TILES)
}

/// A part of a product that is computed at one time.
struct Piece {
    panels: Range<usize>,
    strips: Range<usize>,
    blocks: Range<usize>,
    /// Blocks of the whole product.
    all_blocks: usize,
}

impl Piece {
    fn is_first(&self) -> bool {
        self.blocks.start == 0
    }

    fn is_last(&self) -> bool {
        self.blocks.end == self.all_blocks
    }
}

impl<'a> Product<'a> {
    fn new(
        [left, right]: [Operand; 2],
        depth: usize,
        out: Output<'a>,
        room: PackedSquares,
        instructions: Instructions,
    ) -> Product<'a> {
        Product {
            left,
            right,
            depth,
            out,
            instructions,
            is_parallel: left.rows * depth * right.rows >= SMALL,
            is_symmetric: false,
            room,
        }
    }

    fn run(&self) {
        if self.left.rows * self.right.rows == 0 {
            return;
        }
        let squares = self.instructions.squares();
        let panels = self.right.rows.div_ceil(SIDE);
        let strips = self.left.rows.div_ceil(STRIP);
        // An empty depth is a block of zeros.
        let blocks = self.depth.div_ceil(DEPTH).max(1);
        let cut = Cut::new(panels, strips, blocks, squares, self.room.squares);
        for panels in ranges(0..panels, cut.panels) {
            for strips in ranges(0..strips, cut.strips) {
                for part in ranges(0..blocks, cut.blocks) {
                    self.compute(
                        &Piece {
                            panels: panels.clone(),
                            strips: strips.clone(),
                            blocks: part,
                            all_blocks: blocks,
                        },
                        squares,
                    );
                }
            }
        }
    }

    fn compute(&self, piece: &Piece, squares: usize) {
        self.pack_right(piece, squares);
        let panel = piece.blocks.len() * squares;
        let right = Right {
            pointer: self.room.first.at(0),
            panel,
            panels: piece.panels.len(),
        };
        let right = SharedRight(right);
        self.for_each(piece.strips.clone(), |index| {
            let right = right.get();
            self.instructions.run(Strip {
                product: self,
                piece,
                right,
                index,
            });
        });
    }

    /// Each task packs one panel, or one block of all panels, whichever is contiguous in memory.
    fn pack_right(&self, piece: &Piece, squares: usize) {
        let (operand, panel) = (&self.right, piece.blocks.len() * squares);
        let run = |panels: Range<usize>, blocks: Range<usize>| {
            let skipped = (panels.start - piece.panels.start) * panel
                + (blocks.start - piece.blocks.start) * squares;
            self.instructions.run(PackRight {
                operand,
                part: self.part(operand, panels.start * SIDE..panels.end * SIDE, &blocks),
                to: self.room.first.at(skipped),
                panel,
            });
        };
        if operand.has_contiguous_rows() {
            self.for_each(piece.panels.clone(), |index| {
                run(index..index + 1, piece.blocks.clone())
            });
        } else {
            self.for_each(piece.blocks.clone(), |index| {
                run(piece.panels.clone(), index..index + 1)
            });
        }
    }

    fn for_each(&self, range: Range<usize>, run: impl Fn(usize) + Sync + Send) {
        match self.is_parallel {
            true => range.into_par_iter().for_each(run),
            false => range.for_each(run),
        }
    }

    /// The part of an operand with some of its rows and blocks, up to where it ends.
    fn part(&self, operand: &Operand, rows: Range<usize>, blocks: &Range<usize>) -> Part {
        let place = blocks.start * DEPTH;
        Part {
            row: rows.start,
            place,
            rows: rows.end.min(operand.rows) - rows.start,
            places: (blocks.end * DEPTH).min(self.depth).saturating_sub(place),
        }
    }
}

/// The panels of the right operand, which all threads read.
struct SharedRight(Right);

// SAFETY: while strips are multiplied nobody writes the panels.
unsafe impl Sync for SharedRight {}

impl SharedRight {
    fn get(&self) -> Right {
        self.0
    }
}

/// Divides a range into steps. The last one may be shorter.
fn ranges(all: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    let end = all.end;
    all.step_by(step)
        .map(move |start| start..end.min(start + step))
}

/// The product of a strip of the left operand and the packed panels of the right one.
struct Strip<'a> {
    product: &'a Product<'a>,
    piece: &'a Piece,
    right: Right,
    index: usize,
}

impl Job for Strip<'_> {
    #[inline(always)]
    fn run<S: Tiles>(self) {
        let Strip {
            product,
            piece,
            right,
            index,
        } = self;
        let is_thin = product.right.rows <= S::THIN;
        let panels = self.panels();
        if panels.is_empty() {
            return;
        }
        let right = Right {
            panels: panels.len(),
            ..right
        };
        let mut on_stack = OnStack::<{ STRIP_TILES * RIGHT_PANELS }>::new();
        let mut packed = OnStack::<{ 2 * STRIP_TILES * LEFT_BLOCKS }>::new();
        let sums = match piece.is_first() && piece.is_last() {
            true => on_stack.pointer(),
            false => product.room.first.at(self.kept_sums()),
        };
        for blocks in ranges(piece.blocks.clone(), LEFT_BLOCKS) {
            // SAFETY: the room has so many blocks; the strip is in the operand, and its sums are this task's.
            unsafe {
                let mut left = self.left::<S>(&blocks, packed.pointer());
                let skipped = (blocks.start - piece.blocks.start) * S::SQUARES;
                let mut right = Right {
                    pointer: right.pointer.wrapping_add(skipped),
                    ..right
                };
                if is_thin {
                    (left, right) = self.exchanged(left, right);
                }
                S::multiply(sums, left, right, blocks.len(), blocks.start == 0);
            }
        }
        if piece.is_last() {
            for (place, panel) in panels.enumerate() {
                for tile in 0..STRIP_TILES {
                    let (row, column) = (index * STRIP + tile * SIDE, panel * SIDE);
                    let is_above = product.is_symmetric && column > row;
                    if row < product.left.rows && !is_above {
                        // After an exchange, the only panel's sums are those of the first tile.
                        let at = match is_thin {
                            true => STRIP_TILES * tile,
                            false => STRIP_TILES * place + tile,
                        };
                        let sums = sums.wrapping_add(at);
                        // SAFETY: no other task has this strip and these panels, nor what lies across from them.
                        unsafe {
                            product.out.store::<S>(sums, row, column, is_thin);
                            if product.is_symmetric && column < row {
                                product.out.store::<S>(sums, column, row, !is_thin);
                            }
                        }
                    }
                }
            }
        }
    }
}

impl Strip<'_> {
    /// The panels to multiply. For a symmetric product, those up to the diagonal.
    #[inline(always)]
    fn panels(&self) -> Range<usize> {
        let all = self.piece.panels.clone();
        match self.product.is_symmetric {
            true => all.start..all.end.min((self.index + 1) * STRIP_TILES),
            false => all,
        }
    }

    /// The strip as panels, and the only panel as rows; both were packed for that.
    #[inline(always)]
    fn exchanged(&self, left: Left, right: Right) -> (Left, Right) {
        let rows = Left {
            pointer: right.pointer.cast(),
            rows: self.product.right.rows,
            ..left
        };
        let panels = Right {
            pointer: left.pointer.cast(),
            panel: left.tile / size_of::<Square>(),
            panels: STRIP_TILES,
        };
        (rows, panels)
    }

    /// The first square of the strip's sums in the workspace.
    fn kept_sums(&self) -> usize {
        let strip = self.index - self.piece.strips.start;
        self.product.room.squares / 2 + strip * kept_squares(self.piece.panels.len())
    }

    /// The strip's tiles of some blocks, packed unless they can be read in place.
    ///
    /// # Safety
    /// `room` must have squares for them.
    #[inline(always)]
    unsafe fn left<S: Tiles>(&self, blocks: &Range<usize>, room: *mut Square) -> Left {
        let operand = &self.product.left;
        let part = |rows| self.product.part(operand, rows, blocks);
        let first = self.index * STRIP;
        // Rows with gaps between them take longer to read, so this is worth it only if they are read once.
        if self.piece.panels.len() <= 2 {
            let in_place = operand.in_place::<S>(part(first..first + STRIP));
            if let Some(left) = in_place {
                return left;
            }
        }
        let squares = blocks.len() * S::SQUARES;
        let side = match self.product.right.rows <= S::THIN {
            true => Side::Right,
            false => Side::Left,
        };
        for tile in 0..STRIP_TILES {
            let row = (first + tile * SIDE).min(operand.rows);
            let to = room.wrapping_add(tile * squares);
            // SAFETY: the caller's promise.
            unsafe { pack::<S>(operand, part(row..row + SIDE), side, to) };
        }
        Left {
            pointer: room.cast_const().cast(),
            row: size_of::<[u32; SIDE]>(),
            block: S::SQUARES * size_of::<Square>(),
            tile: squares * size_of::<Square>(),
            rows: STRIP,
        }
    }
}
