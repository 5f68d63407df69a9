//! Mixes samples of several sources by their shares.

use crate::{
    Position,
    order::{SourceOrder, keyed_rng, shuffled},
};

/// The number of samples that each source has, and that it gives to an epoch.
#[derive(Debug, Clone)]
pub(crate) struct Shares {
    sizes: Vec<u64>,
    /// At least one for each source.
    quotas: Vec<u64>,
}

impl Shares {
    /// An epoch has about as many samples as all sources. Without weights, each source gives its own samples once.
    pub(crate) fn new(sizes: Vec<u64>, weights: Option<&[f64]>) -> Self {
        let all: u64 = sizes.iter().sum();
        let quotas = weights.map(|weights| {
            let sum: f64 = weights.iter().sum();
            let quota = |weight: &f64| (weight / sum * all as f64).round().max(1.0) as u64;
            weights.iter().map(quota).collect()
        });
        Self {
            quotas: quotas.unwrap_or_else(|| sizes.clone()),
            sizes,
        }
    }

    /// Samples in an epoch.
    pub(crate) fn samples(&self) -> u64 {
        self.quotas.iter().sum()
    }

    /// The samples that a source has, and those that it gives to an epoch.
    pub(crate) fn of(&self, source: usize) -> (u64, u64) {
        (self.sizes[source], self.quotas[source])
    }

    /// How often an epoch reads all samples of a source.
    pub(crate) fn passes(&self, source: usize) -> f64 {
        let (size, quota) = self.of(source);
        quota as f64 / size as f64
    }

    /// Adds the shares to a checksum, so that a resumed run notices a change.
    pub(crate) fn fingerprint(&self, crc: &mut crc32fast::Hasher) {
        for quota in &self.quotas {
            crc.update(&quota.to_le_bytes());
        }
    }
}

/// Maps positions to samples.
#[derive(Debug)]
pub(crate) enum Order {
    /// There is one source.
    One(SourceOrder),
    /// Several sources take turns.
    Mixed(MixedOrder),
}

impl Order {
    /// The sample at a position. The caller keeps its index below the number of samples.
    pub(crate) fn sample(&mut self, at: Position) -> usize {
        match self {
            Order::One(order) => order.sample(at),
            Order::Mixed(mixed) => mixed.sample(at),
        }
    }
}

/// The order of the samples of several sources.
///
/// Each source is read in its own order, pass after pass, and continues from one epoch to the next. So the `k`-th
/// sample that a source gives in an epoch follows from the epoch and `k`. The position decides whose turn it is.
#[derive(Debug)]
pub(crate) struct MixedOrder {
    shares: Shares,
    seed: Option<u64>,
    orders: Vec<SourceOrder>,
    /// The last used turns, and their epoch. A turn is a number below the samples of an epoch: first come the numbers
    /// of the first source, in the order in which it gives its samples, then those of the second.
    turns: Option<(u64, Vec<u64>)>,
}

impl MixedOrder {
    /// With `seed`, samples and turns are shuffled.
    pub(crate) fn new(shares: Shares, seed: Option<u64>) -> Self {
        let own_seed = |source: usize| {
            let apart = (source as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            seed.map(|seed| seed.wrapping_add(apart))
        };
        let orders = shares.sizes.iter().enumerate();
        let orders = orders.map(|(source, size)| SourceOrder::new(own_seed(source), *size));
        Self {
            orders: orders.collect(),
            shares,
            seed,
            turns: None,
        }
    }

    /// The sample at a position. The samples of the sources are numbered one source after the other.
    pub(crate) fn sample(&mut self, at: Position) -> usize {
        let key = self.seed.map_or(0, |_| at.epoch);
        let (_, turns) = match self.turns.take() {
            Some(kept) if kept.0 == key => self.turns.insert(kept),
            _ => self
                .turns
                .insert((key, turns(&self.shares, self.seed, key))),
        };
        let mut turn = turns[at.index as usize];
        let mut source = 0;
        let mut before = 0;
        while turn >= self.shares.quotas[source] {
            turn -= self.shares.quotas[source];
            before += self.shares.sizes[source];
            source += 1;
        }
        let (size, quota) = self.shares.of(source);
        let given = u128::from(at.epoch) * u128::from(quota) + u128::from(turn);
        let own = Position {
            epoch: (given / u128::from(size)) as u64,
            index: (given % u128::from(size)) as u64,
        };
        before as usize + self.orders[source].sample(own)
    }
}

/// The turns of an epoch: shuffled, or with each source's turns spread evenly.
fn turns(shares: &Shares, seed: Option<u64>, epoch: u64) -> Vec<u64> {
    let quotas = &shares.quotas;
    let sources: Vec<usize> = match seed {
        Some(seed) => {
            let each = quotas.iter().enumerate();
            let all = each.flat_map(|(source, quota)| (0..*quota).map(move |_| source));
            let mut rng = keyed_rng(seed, epoch, b"turns of sources");
            shuffled(all.collect(), &mut rng)
        }
        None => evenly(quotas),
    };
    let mut next: Vec<u64> = Vec::with_capacity(quotas.len());
    let mut before = 0;
    for quota in quotas {
        next.push(before);
        before += quota;
    }
    let take = |source: usize| {
        next[source] += 1;
        next[source] - 1
    };
    sources.into_iter().map(take).collect()
}

/// Spreads the turns of each source evenly over an epoch: the middle of turn `k` of `q` is at `(k + 1/2) / q` of the
/// epoch. The turn with the earliest middle is next; of equal ones, that of the first source.
fn evenly(quotas: &[u64]) -> Vec<usize> {
    let samples: u64 = quotas.iter().sum();
    let mut given = vec![0u64; quotas.len()];
    let mut sources = Vec::with_capacity(samples as usize);
    for _ in 0..samples {
        let is_earlier = |a: usize, b: usize| {
            let middle = |source: usize| 2 * u128::from(given[source]) + 1;
            middle(a) * u128::from(quotas[b]) < middle(b) * u128::from(quotas[a])
        };
        let due = (1..quotas.len()).fold(0, |first, source| match is_earlier(source, first) {
            true => source,
            false => first,
        });
        given[due] += 1;
        sources.push(due);
    }
    sources
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(order: &mut MixedOrder, epoch: u64, samples: u64) -> Vec<usize> {
        let at = |index| Position { epoch, index };
        (0..samples).map(|index| order.sample(at(index))).collect()
    }

    #[test]
    fn without_weights_an_epoch_has_every_sample_once() {
        let shares = Shares::new(vec![30, 10, 5], None);
        for seed in [None, Some(3)] {
            let mut order = MixedOrder::new(shares.clone(), seed);
            for epoch in [0, 1, 7] {
                let mut taken = read(&mut order, epoch, 45);
                assert_ne!(taken, (0..45).collect::<Vec<_>>(), "sources take turns");
                taken.sort_unstable();
                assert_eq!(taken, (0..45).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn weights_are_shares_of_an_epoch_and_each_source_goes_on_where_it_was() {
        let shares = Shares::new(vec![90, 10], Some(&[0.25, 0.75]));
        assert_eq!((shares.samples(), shares.of(0)), (100, (90, 25)));
        for seed in [None, Some(3)] {
            let mut order = MixedOrder::new(shares.clone(), seed);
            let epochs: Vec<_> = (0..4).map(|epoch| read(&mut order, epoch, 100)).collect();
            for epoch in &epochs {
                let of_first = epoch.iter().filter(|sample| **sample < 90);
                assert_eq!(of_first.count(), 25);
            }
            // 4 x 25 samples from a source of 90: the first 90 of them are a whole pass.
            let all = epochs.concat().into_iter();
            let mut first: Vec<_> = all.filter(|sample| *sample < 90).take(90).collect();
            first.sort_unstable();
            assert_eq!(first, (0..90).collect::<Vec<_>>());
        }
    }

    #[test]
    fn in_file_order_turns_are_spread_evenly() {
        assert_eq!(evenly(&[2, 4]), [1, 0, 1, 1, 0, 1]);
        assert_eq!(evenly(&[3]), [0, 0, 0]);
    }

    #[test]
    fn any_position_is_reached_without_those_before() {
        let shares = || Shares::new(vec![7, 5], Some(&[1.0, 3.0]));
        let mut order = MixedOrder::new(shares(), Some(9));
        let all = [0, 1, 2].map(|epoch| read(&mut order, epoch, 12));
        let at = Position { epoch: 2, index: 7 };
        assert_eq!(MixedOrder::new(shares(), Some(9)).sample(at), all[2][7]);
        assert_ne!(all[0], all[1]);
    }

    #[test]
    fn a_tiny_weight_still_gives_a_sample() {
        let shares = Shares::new(vec![10, 10], Some(&[1e-9, 1.0]));
        assert_eq!((shares.of(0).1, shares.samples()), (1, 21));
    }
}
