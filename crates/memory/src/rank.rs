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

/// The parts of every sequence that a rank has: neighbours among equal ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnParts {
    /// The number of the first, from 0.
    pub first: usize,
    /// How many it has.
    pub count: usize,
    /// How many parts a sequence has.
    pub of: usize,
}

impl OwnParts {
    /// Whole sequences.
    pub const WHOLE: OwnParts = OwnParts {
        first: 0,
        count: 1,
        of: 1,
    };

    /// Each of them, by its number among all parts.
    pub fn each(self) -> impl Iterator<Item = Rank> {
        let own = self.first..self.first + self.count;
        own.map(move |number| Rank {
            number,
            of: self.of,
        })
    }
}
