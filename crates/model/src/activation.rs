//! Named activations that stages read and write, their shapes, and the labels that policies name them by.

use crate::Label;
use crate::label::fnv;
use kernels::operation::DELTA_CHUNK;
use memory::{DType, Dims};
use std::ops::Range;

/// A named intermediate result of a block. Its name tells it apart from the block's others.
#[derive(Clone, Copy, Debug)]
pub struct Activation {
    name: &'static str,
    gradient_name: &'static str,
    label: Label,
    /// A hash of the name, so that comparing two is cheap: a plan of a large model compares millions.
    id: u64,
}

impl PartialEq for Activation {
    fn eq(&self, other: &Activation) -> bool {
        self.id == other.id
    }
}

impl Eq for Activation {}

impl std::hash::Hash for Activation {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.id.hash(state);
    }
}

impl Activation {
    /// The block's input `[b s, h]`, the residual stream. The previous block writes it as [`Activation::NEXT_X`]. The
    /// embedding writes the first block's, and the head reads what the last block writes.
    pub const X: Activation = Activation::new("x", "d_x", Label::BLOCK_INPUT);

    /// The [`Activation::X`] of the next block. A block's last stage writes it.
    pub const NEXT_X: Activation = Activation::new("next_x", "d_x", Label::BLOCK_INPUT);

    /// An activation with the name of its gradient in reports, and the smallest label that covers it.
    pub const fn new(name: &'static str, gradient_name: &'static str, label: Label) -> Activation {
        Activation {
            name,
            gradient_name,
            label,
            id: fnv(name),
        }
    }

    /// The name in reports.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// The name of its gradient in reports.
    pub fn gradient_name(self) -> &'static str {
        self.gradient_name
    }

    /// The smallest label that covers it.
    pub fn label(self) -> Label {
        self.label
    }
}

/// The sequences of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShape {
    /// Sequences.
    pub rows: usize,
    /// Tokens in each.
    pub seq: usize,
}

impl BatchShape {
    /// Tokens in all.
    pub fn tokens(self) -> usize {
        self.rows * self.seq
    }

    /// The sequences that have some of these tokens, each with the tokens.
    pub(crate) fn sequences(
        self,
        tokens: Range<usize>,
    ) -> impl Iterator<Item = (usize, Range<usize>)> {
        let of = move |row: usize| {
            let (start, end) = (row * self.seq, (row + 1) * self.seq);
            (row, tokens.start.max(start)..tokens.end.min(end))
        };
        (tokens.start / self.seq..tokens.end.div_ceil(self.seq)).map(of)
    }

    /// Cuts the micro-batch into tiles of at most `tokens` tokens: several whole sequences, or a part of one. Gives
    /// each tile's first token number and shape.
    pub(crate) fn tiles(self, tokens: usize) -> impl Iterator<Item = (usize, BatchShape)> {
        let (rows, seq) = ((tokens / self.seq).max(1), tokens.min(self.seq));
        let tile = move |row: usize, start: usize| {
            let shape = BatchShape {
                rows: rows.min(self.rows - row),
                seq: seq.min(self.seq - start),
            };
            (row * self.seq + start, shape)
        };
        let starts = move |row| {
            (0..self.seq)
                .step_by(seq)
                .map(move |start| tile(row, start))
        };
        (0..self.rows).step_by(rows).flat_map(starts)
    }
}

/// A dimension of an activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dimension {
    /// Tokens of the micro-batch.
    Tokens,
    /// This many rows for each token of the micro-batch.
    TokensTimes(usize),
    /// Sequences of the micro-batch.
    Rows,
    /// Tokens of a sequence.
    Seq,
    /// This many for each token of a sequence.
    SeqTimes(usize),
    /// States in front of chunks of the gated delta rule, of all sequences of the micro-batch, which have so many parts: every so many-th.
    States {
        /// Parts of a sequence.
        parts: usize,
        /// Chunks between two states that are kept.
        interval: usize,
    },
    /// The same for every micro-batch.
    Fixed(usize),
}

/// What an activation holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Element {
    /// The compute type.
    Compute,
    /// Codes of FP8 in training; otherwise the compute type.
    Codes,
    /// Single precision, whatever the compute type: statistics.
    F32,
    /// Integers, for tables of indices. They have no gradient.
    I32,
}

/// Shape and type of an activation, before the micro-batch is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first `rank` are in use; the others are [`Dimension::Fixed`] of 1.
    sizes: [Dimension; 4],
    rank: usize,
    element: Element,
}

impl Extent {
    /// `[b s, width]` of the compute type.
    pub fn tokens(width: usize) -> Extent {
        Extent::of(&[Dimension::Tokens, Dimension::Fixed(width)])
    }

    /// At most four dimensions, of the compute type.
    pub fn of(sizes: &[Dimension]) -> Extent {
        let mut all = [Dimension::Fixed(1); 4];
        all[..sizes.len()].copy_from_slice(sizes);
        Extent {
            sizes: all,
            rank: sizes.len(),
            element: Element::Compute,
        }
    }

    /// Dimensions in f32, whatever the compute type: statistics.
    pub fn of_f32(sizes: &[Dimension]) -> Extent {
        Extent {
            element: Element::F32,
            ..Extent::of(sizes)
        }
    }

    /// `[b s, width]` of codes of FP8, in training.
    pub(crate) fn codes(width: usize) -> Extent {
        Extent {
            element: Element::Codes,
            ..Extent::tokens(width)
        }
    }

    /// The same where nothing is kept as codes.
    pub(crate) fn uncoded(self) -> Extent {
        match self.element {
            Element::Codes => Extent {
                element: Element::Compute,
                ..self
            },
            _ => self,
        }
    }

    /// Dimensions in i32, for tables of indices.
    pub fn of_i32(sizes: &[Dimension]) -> Extent {
        Extent {
            element: Element::I32,
            ..Extent::of(sizes)
        }
    }

    /// Whether it has one row for each token.
    pub(crate) fn is_by_token(&self) -> bool {
        let (first, others) = (self.sizes[0], &self.sizes[1..]);
        first == Dimension::Tokens
            && others
                .iter()
                .all(|size| matches!(size, Dimension::Fixed(_)))
    }

    /// Elements for `rows` sequences of `seq` tokens, as a float, so that it cannot overflow.
    pub fn elements(&self, rows: usize, seq: usize) -> f64 {
        let size = |size: &Dimension| match *size {
            Dimension::Tokens => rows as f64 * seq as f64,
            Dimension::TokensTimes(count) => rows as f64 * seq as f64 * count as f64,
            Dimension::Rows => rows as f64,
            Dimension::Seq => seq as f64,
            Dimension::SeqTimes(count) => seq as f64 * count as f64,
            Dimension::States { parts, interval } => {
                rows as f64 * (seq * parts).div_ceil(DELTA_CHUNK).div_ceil(interval) as f64
            }
            Dimension::Fixed(size) => size as f64,
        };
        self.sizes.iter().map(size).product()
    }

    /// Shape and type for a micro-batch and a compute type.
    pub fn resolve(&self, batch: BatchShape, compute: DType) -> (Dims, DType) {
        let size = |size: &Dimension| match *size {
            Dimension::Tokens => batch.tokens(),
            Dimension::TokensTimes(count) => batch.tokens() * count,
            Dimension::Rows => batch.rows,
            Dimension::Seq => batch.seq,
            Dimension::SeqTimes(count) => batch.seq * count,
            Dimension::States { parts, interval } => {
                batch.rows * (batch.seq * parts).div_ceil(DELTA_CHUNK).div_ceil(interval)
            }
            Dimension::Fixed(size) => size,
        };
        let sizes = self.sizes.each_ref().map(size);
        let dims = Dims::try_from(&sizes[..self.rank]);
        let dims = dims.expect("an activation has one to four dimensions");
        let dtype = match self.element {
            Element::Compute => compute,
            Element::Codes => DType::F8E4M3,
            Element::F32 => DType::F32,
            Element::I32 => DType::I32,
        };
        (dims, dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_parts_of_a_sequence_or_whole_ones() {
        let batch = BatchShape { rows: 3, seq: 13 };
        let tiles = |tokens: usize| -> Vec<(usize, usize, usize)> {
            let tiles = batch.tiles(tokens);
            tiles
                .map(|(first, tile)| (first, tile.rows, tile.seq))
                .collect()
        };
        let parts = [0, 13, 26].map(|row| [(row, 1, 5), (row + 5, 1, 5), (row + 10, 1, 3)]);
        assert_eq!(tiles(5), parts.concat());
        for tokens in [13, 25] {
            assert_eq!(tiles(tokens), [0, 13, 26].map(|row| (row, 1, 13)));
        }
        assert_eq!(tiles(30), [(0, 2, 13), (26, 1, 13)]);
        assert_eq!(tiles(39), [(0, 3, 13)]);
        assert_eq!(tiles(1).len(), batch.tokens());
    }
}
