//! Ranks: the processes that train together.

/// One of the ranks that train together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    /// Its number, from 0.
    pub number: usize,
    /// The number of ranks.
    pub of: usize,
}

impl Rank {
    /// The only rank of a run without others.
    pub const ALONE: Rank = Rank { number: 0, of: 1 };

    /// All of `of` ranks, in order.
    pub fn all(of: usize) -> impl Iterator<Item = Rank> {
        (0..of).map(move |number| Rank { number, of })
    }
}
