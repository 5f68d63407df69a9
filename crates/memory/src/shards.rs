//! What ranks have of a bundle: the piece that each updates, and under ZeRO 3 the shard of the weights that it keeps.

use crate::{Cover, Layout, Rank};
use std::ops::Range;

impl Layout {
    /// The same layout for ranks that keep the weights once in every group of so many neighbours, a shard each, instead of once
    /// among all ranks. What a rank updates is part of its shard.
    ///
    /// # Panics
    /// If the layout has shard groups already.
    pub fn in_shard_groups(mut self, ranks: usize) -> Layout {
        assert!(self.shard_group_size.is_none(), "groups are made once");
        self.shard_group_size = Some(ranks);
        self
    }

    /// The ranks of a shard group that `rank` is one of: all, if there are no groups.
    pub fn ranks_of_shard_group(&self, rank: Rank) -> impl Iterator<Item = Rank> {
        let [own, _] = self.places(rank);
        let first = rank.number - own.number;
        Rank::all(rank.of).skip(first).take(own.of)
    }

    /// The ranks that have the same shard as `rank`, one of each group.
    pub fn ranks_of_shard(&self, rank: Rank) -> impl Iterator<Item = Rank> {
        let [own, _] = self.places(rank);
        Rank::all(rank.of).skip(own.number).step_by(own.of)
    }

    /// What a rank updates of a bundle, and adds up the gradients of. All ranks have equally many elements of it.
    pub fn piece(&self, bundle: &Cover, rank: Rank) -> Cover {
        // Every rank keeps all vectors. In the order of ranks NCCL gathers them at once.
        let is_of_unit = |range: &Range<usize>| range.start < self.matrices().end;
        if self.shard_group_size.is_none() || !bundle.ranges().first().is_some_and(is_of_unit) {
            return bundle.part(rank);
        }
        let [own, group] = self.places(rank);
        bundle.part(own).part(group)
    }

    /// What a rank keeps of a bundle of weights under ZeRO 3: the pieces of all ranks with its place in their shard groups.
    pub fn shard(&self, bundle: &Cover, rank: Rank) -> Cover {
        let [own, _] = self.places(rank);
        bundle.part(own)
    }

    /// A rank's shards of all matrices, trained and frozen.
    pub fn shards(&self, rank: Rank) -> Cover {
        let bundles = self.units.iter().flat_map(|unit| unit.bundles());
        Cover::joined(bundles.map(|bundle| self.shard(bundle, rank)))
    }

    /// A rank's place in its shard group, and that group's place among all groups.
    fn places(&self, rank: Rank) -> [Rank; 2] {
        let of = self.shard_group_size.unwrap_or(rank.of);
        let own = Rank {
            number: rank.number % of,
            of,
        };
        let group = Rank {
            number: rank.number / of,
            of: rank.of / of,
        };
        [own, group]
    }
}
