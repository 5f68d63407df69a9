//! Ranks that share sequences, and what each has of attention.

use crate::activation::Dimension;
use crate::{AttentionSpec, Extent};
use memory::Rank;

/// The ranks that share sequences: neighbours among all ranks. Rank `c` of `n` has the `c`-th of `n` equal parts of each sequence,
/// and the `c`-th of `n` equal parts of the heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharingRanks {
    /// The number of the first of them among the ranks of this stage of a pipeline.
    pub first: usize,
    /// This rank among them.
    pub rank: Rank,
}

impl SharingRanks {
    /// A rank that shares its sequences with no other.
    pub const ALONE: SharingRanks = SharingRanks {
        first: 0,
        rank: Rank::ALONE,
    };

    /// The attention that each rank computes of a block's: its heads. Several ranks have the same head of keys where there are more
    /// ranks than those.
    pub fn attention(self, whole: &AttentionSpec) -> AttentionSpec {
        AttentionSpec {
            heads: whole.heads / self.rank.of,
            kv_heads: (whole.kv_heads / self.rank.of).max(1),
            ..whole.clone()
        }
    }

    /// Tokens of a whole sequence.
    pub(crate) fn seq(self) -> Dimension {
        match self.rank.of {
            1 => Dimension::Seq,
            of => Dimension::SeqTimes(of),
        }
    }

    /// An activation with a row for each token of whole sequences.
    pub(crate) fn tokens(self, width: usize) -> Extent {
        match self.rank.of {
            1 => Extent::tokens(width),
            of => Extent::of(&[Dimension::TokensTimes(of), Dimension::Fixed(width)]),
        }
    }
}
