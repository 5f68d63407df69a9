//! Ranks: the processes that train together.

/// One of the ranks that train together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    /// Which one, from 0.
    pub number: usize,
    /// How many there are.
    pub of: usize,
}

impl Rank {
    /// The only one.
    pub const ALONE: Rank = Rank { number: 0, of: 1 };

    /// All of so many, in order.
    pub fn all(of: usize) -> impl Iterator<Item = Rank> {
        (0..of).map(move |number| Rank { number, of })
    }
}
