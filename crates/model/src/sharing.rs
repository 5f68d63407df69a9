//! Ranks that share sequences, and what each part of a sequence has of attention.

use crate::activation::Dimension;
use crate::{AttentionSpec, Extent};
use memory::{OwnParts, Rank};

/// The ranks that share sequences: neighbours among all ranks. Each sequence has equal parts, and rank `c` has the `c`-th `parts_each`
/// of them. Heads have as many equal parts, and a rank computes attention for those with the numbers of its parts, one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharingRanks {
    /// The number of the first of them among the ranks of this stage of a pipeline.
    pub first: usize,
    /// This rank among them.
    pub rank: Rank,
    /// How many parts each has.
    pub parts_each: usize,
}

impl SharingRanks {
    /// A rank that shares its sequences with no other.
    pub const ALONE: SharingRanks = SharingRanks {
        first: 0,
        rank: Rank::ALONE,
        parts_each: 1,
    };

    /// How many parts a sequence has.
    pub fn parts(self) -> usize {
        self.rank.of * self.parts_each
    }

    /// This rank's parts.
    pub fn own_parts(self) -> OwnParts {
        OwnParts {
            first: self.rank.number * self.parts_each,
            count: self.parts_each,
            of: self.parts(),
        }
    }

    /// The attention that is computed at a time of a block's: one part of its heads. Several parts have the same head of keys where
    /// there are more parts than those.
    pub fn attention(self, whole: &AttentionSpec) -> AttentionSpec {
        AttentionSpec {
            heads: whole.heads / self.parts(),
            kv_heads: (whole.kv_heads / self.parts()).max(1),
            ..whole.clone()
        }
    }

    /// Tokens of a whole sequence.
    pub(crate) fn seq(self) -> Dimension {
        match self.parts() {
            1 => Dimension::Seq,
            of => Dimension::SeqTimes(of),
        }
    }

    /// An activation with a row for each token of whole sequences.
    pub(crate) fn tokens(self, width: usize) -> Extent {
        match self.parts() {
            1 => Extent::tokens(width),
            of => Extent::of(&[Dimension::TokensTimes(of), Dimension::Fixed(width)]),
        }
    }
}
