//! The order of samples: file order, or a new seeded permutation in each epoch.

use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};
use serde::{Deserialize, Serialize};

/// The next sample to be read. Together with the data and the options it determines all that follows, so saving it is
/// enough to resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Position {
    /// Whole passes over the data before this one.
    pub epoch: u64,
    /// Samples already taken in this epoch; always below the number of samples.
    pub index: u64,
}

impl Position {
    /// The position one sample later, of `samples` in an epoch.
    pub(crate) fn next(self, samples: u64) -> Self {
        if self.index + 1 < samples {
            Self {
                index: self.index + 1,
                ..self
            }
        } else {
            Self {
                epoch: self.epoch.wrapping_add(1),
                index: 0,
            }
        }
    }
}

/// Maps positions to the samples of one source.
#[derive(Debug)]
pub(crate) enum SourceOrder {
    /// Position `index` is sample `index`.
    File,
    /// Position `index` is the permutation's entry `index`.
    Shuffled {
        seed: u64,
        samples: u64,
        /// The permutation last used, and its epoch.
        current: Option<(u64, Permutation)>,
    },
}

impl SourceOrder {
    /// Shuffled by the seed, or file order.
    pub(crate) fn new(seed: Option<u64>, samples: u64) -> Self {
        match seed {
            None => Self::File,
            Some(seed) => Self::Shuffled {
                seed,
                samples,
                current: None,
            },
        }
    }

    /// The sample at a position. The caller keeps its index below the number of samples.
    pub(crate) fn sample(&mut self, at: Position) -> usize {
        let index = at.index as usize;
        match self {
            Self::File => index,
            Self::Shuffled {
                seed,
                samples,
                current,
            } => {
                let (_, samples) = match current.take() {
                    Some(kept) if kept.0 == at.epoch => current.insert(kept),
                    _ => current.insert((at.epoch, permutation(*seed, at.epoch, *samples))),
                };
                match samples {
                    Permutation::Narrow(samples) => samples[index] as usize,
                    Permutation::Wide(samples) => samples[index] as usize,
                }
            }
        }
    }
}

/// Sample numbers, in 4 bytes each if that is enough, else in 8.
#[derive(Debug)]
pub(crate) enum Permutation {
    Narrow(Vec<u32>),
    Wide(Vec<u64>),
}

/// The order of `samples` samples in one epoch, drawn from ChaCha8 keyed by seed and epoch.
fn permutation(seed: u64, epoch: u64, samples: u64) -> Permutation {
    tracing::debug!(epoch, samples, "shuffling");
    let mut rng = keyed_rng(seed, epoch, b"sample order    ");
    match u32::try_from(samples) {
        Ok(samples) => Permutation::Narrow(shuffled((0..samples).collect(), &mut rng)),
        Err(_) => Permutation::Wide(shuffled((0..samples).collect(), &mut rng)),
    }
}

/// Fisher and Yates's shuffle.
pub(crate) fn shuffled<T>(mut order: Vec<T>, rng: &mut ChaCha8Rng) -> Vec<T> {
    for last in (1..order.len()).rev() {
        let chosen = below(rng, last as u64 + 1) as usize;
        order.swap(last, chosen);
    }
    order
}

/// A separate generator for each pair of numbers and purpose.
pub(crate) fn keyed_rng(first: u64, second: u64, purpose: &[u8; 16]) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&first.to_le_bytes());
    key[8..16].copy_from_slice(&second.to_le_bytes());
    key[16..].copy_from_slice(purpose);
    ChaCha8Rng::from_seed(key)
}

/// A number below `bound`, by scaling one 64-bit draw. It is the same on every platform and for all features of `rand`;
/// its bias is below `bound / 2^64`.
pub(crate) fn below(rng: &mut ChaCha8Rng, bound: u64) -> u64 {
    let scaled = u128::from(rng.next_u64()) * u128::from(bound);
    (scaled >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The permutation as u64. Fewer than 2^32 samples must be kept narrow.
    fn permutation(seed: u64, epoch: u64, samples: u64) -> Vec<u64> {
        match super::permutation(seed, epoch, samples) {
            Permutation::Narrow(order) => order.into_iter().map(u64::from).collect(),
            Permutation::Wide(_) => panic!("{samples} samples need no 8 bytes each"),
        }
    }

    fn sorted(mut order: Vec<u64>) -> Vec<u64> {
        order.sort_unstable();
        order
    }

    #[test]
    fn the_order_is_a_permutation_that_never_changes() {
        // Recorded from the first run: runs that are resumed with a later release depend on it.
        assert_eq!(permutation(42, 0, 10), [1, 5, 8, 9, 3, 6, 4, 2, 0, 7]);
        assert_eq!(permutation(42, 1, 10), [5, 9, 3, 0, 8, 7, 6, 2, 1, 4]);
    }

    #[test]
    fn seed_and_epoch_each_make_another_order() {
        let base = permutation(1, 0, 1000);
        assert_eq!(sorted(base.clone()), (0..1000).collect::<Vec<_>>());
        assert_eq!(base, permutation(1, 0, 1000));
        assert_ne!(base, permutation(2, 0, 1000));
        assert_ne!(base, permutation(1, 1, 1000));
        assert_ne!(permutation(2, 1, 1000), permutation(1, 2, 1000));
    }

    #[test]
    fn each_sample_comes_first_about_equally_often() {
        let mut first = [0; 8];
        for epoch in 0..8000 {
            first[permutation(7, epoch, 8)[0] as usize] += 1;
        }
        // 1000 are expected in each, with a standard deviation of 30.
        assert!(
            first.iter().all(|count| (850..1150).contains(count)),
            "{first:?}"
        );
    }

    #[test]
    fn each_epoch_reads_its_own_permutation_in_any_order_of_epochs() {
        let mut order = SourceOrder::new(Some(3), 100);
        for epoch in [0, 0, 1, 0, 5] {
            let expected = permutation(3, epoch, 100);
            let read = (0..100).map(|index| order.sample(Position { epoch, index }) as u64);
            assert_eq!(read.collect::<Vec<_>>(), expected, "epoch {epoch}");
        }
    }

    #[test]
    fn positions_roll_over_into_the_next_epoch() {
        let mut at = Position::default();
        let mut seen = Vec::new();
        for _ in 0..5 {
            seen.push((at.epoch, at.index));
            at = at.next(2);
        }
        assert_eq!(seen, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]);
    }
}
