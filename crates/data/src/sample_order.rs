//! Which sample is at a position.

use crate::{Dataset, Packing, Position, Result, buckets::Buckets, mix::Order};

/// [`Dataset::check_targets`] looks at no more samples than these, which takes seconds.
const MOST_SAMPLES_CHECKED: usize = 1 << 24;

/// The order of a dataset's samples. It follows from the dataset alone, whatever was asked before.
#[derive(Debug)]
pub(crate) struct SampleOrder {
    order: Order,
    buckets: Option<Buckets>, // for padded rows
}

impl SampleOrder {
    pub(crate) fn new(dataset: &Dataset) -> Self {
        let (options, samples) = (dataset.options(), dataset.samples());
        let seed = options.shuffle.then_some(options.seed);
        let together = options.rows_together();
        let (rows, samples) = (options.micro_batch / together, samples / together);
        Self {
            order: dataset.order(seed),
            buckets: (options.packing == Packing::Pad).then(|| Buckets::new(rows, samples, seed)),
        }
    }

    /// The sample at a position. The samples of a pair follow each other, and the order is that of pairs.
    pub(crate) fn sample(&mut self, dataset: &Dataset, at: Position) -> usize {
        let together = dataset.options().rows_together();
        let first = Position {
            index: at.index / together as u64,
            ..at
        };
        let length = |group: usize| {
            let samples = group * together..(group + 1) * together;
            let lengths = samples.map(|sample| dataset.length(sample));
            lengths.max().unwrap_or(0)
        };
        let group = match &mut self.buckets {
            None => self.order.sample(first),
            Some(buckets) => buckets.sample(first, &mut self.order, length),
        };
        group * together + at.index as usize % together
    }
}

impl Dataset {
    /// Refuses a step without any target among the next `steps` steps from `from` on, as far as indices tell: batch files are
    /// not read, and of very long runs only the beginning is looked at.
    ///
    /// # Errors
    /// [`DataError::NoTargets`](crate::DataError::NoTargets) for the first such step.
    pub fn check_targets(&self, from: Position, steps: usize) -> Result {
        let all = 0..self.rows();
        let is_empty: Vec<bool> = all.map(|sample| self.targets(sample) == Some(0)).collect();
        if !is_empty.contains(&true) {
            return Ok(());
        }
        let rows = self.options().micro_batch * self.options().accum;
        let (mut order, mut position) = (SampleOrder::new(self), from);
        for _ in 0..steps.min(MOST_SAMPLES_CHECKED / rows) {
            let epoch = position.epoch;
            let samples: Vec<usize> = (0..rows)
                .map(|_| {
                    let sample = order.sample(self, position);
                    position = position.next(self.samples() as u64);
                    sample
                })
                .collect();
            if samples.iter().all(|&sample| is_empty[sample]) {
                return Err(self.no_targets(&samples, epoch));
            }
        }
        Ok(())
    }
}
