//! Brings rows of similar length together, so that padded micro-batches have little padding.

use crate::{
    Position,
    mix::Order,
    order::{keyed_rng, shuffled},
};

/// Number of micro-batches whose rows are sorted by length together: enough to make rows nearly equal, and few enough
/// to keep the order random.
const WINDOW: u64 = 64;

/// The possible lengths of padded micro-batches, in order, for sequences of at most `seq` tokens. They are multiples of
/// 64, and at most 16, so that each can be planned.
pub fn padded_lengths(seq: usize) -> impl DoubleEndedIterator<Item = usize> {
    let unit = seq.div_ceil(16).next_multiple_of(64);
    (1..=seq.div_ceil(unit)).map(move |units| (units * unit).min(seq))
}

/// Changes the order of samples within windows. A window's samples are sorted by length and divided into micro-batches,
/// which are shuffled if samples are. The result depends only on the position.
#[derive(Debug)]
pub(crate) struct Buckets {
    rows: u64,
    samples: u64,
    seed: Option<u64>,
    window: Window, // the one last used
}

#[derive(Debug, Default)]
struct Window {
    epoch: u64,
    start: u64,
    samples: Vec<usize>,
}

impl Buckets {
    /// With `seed`, micro-batches are shuffled.
    pub(crate) fn new(rows: usize, samples: usize, seed: Option<u64>) -> Self {
        Self {
            rows: rows as u64,
            samples: samples as u64,
            seed,
            window: Window::default(),
        }
    }

    /// The sample at a position.
    pub(crate) fn sample(
        &mut self,
        at: Position,
        order: &mut Order,
        length: impl Fn(usize) -> usize,
    ) -> usize {
        let (start, end) = self.window_at(at);
        let kept = &self.window;
        if (kept.epoch, kept.start) != (at.epoch, start) || kept.samples.is_empty() {
            self.window = Window {
                epoch: at.epoch,
                start,
                samples: self.sorted(at.epoch, start, end, order, length),
            };
        }
        self.window.samples[(at.index - start) as usize]
    }

    /// The start and end of the window at a position. Windows begin with a micro-batch, so samples that complete the
    /// last micro-batch of the epoch before form their own window.
    fn window_at(&self, at: Position) -> (u64, u64) {
        let (rows, samples) = (u128::from(self.rows), u128::from(self.samples));
        let taken = (u128::from(at.epoch) % rows * (samples % rows) % rows) as u64;
        let head = ((self.rows - taken) % self.rows).min(self.samples);
        if at.index < head {
            return (0, head);
        }
        let size = self.rows.saturating_mul(WINDOW);
        let start = head + (at.index - head) / size * size;
        (start, start.saturating_add(size).min(self.samples))
    }

    fn sorted(
        &self,
        epoch: u64,
        start: u64,
        end: u64,
        order: &mut Order,
        length: impl Fn(usize) -> usize,
    ) -> Vec<usize> {
        let samples = (start..end).map(|index| order.sample(Position { epoch, index }));
        let mut samples: Vec<usize> = samples.collect();
        samples.sort_by_cached_key(|&sample| length(sample));
        let Some(seed) = self.seed else {
            return samples;
        };
        let purpose = [*b"buckets ", start.to_le_bytes()].concat();
        let purpose = purpose.as_array().expect("twice 8 bytes");
        // A last micro-batch that the next epoch completes must stay last.
        let (groups, rest) = samples.split_at(samples.len() - samples.len() % self.rows as usize);
        let groups: Vec<&[usize]> = groups.chunks(self.rows as usize).collect();
        let groups = shuffled(groups, &mut keyed_rng(seed, epoch, purpose));
        [&groups.concat(), rest].concat()
    }
}
