//! Which sample is at a position.

use crate::{Dataset, Packing, Position, buckets::Buckets, mix::Order};

/// The order of a dataset's samples. It follows from the dataset alone, whatever was asked before.
#[derive(Debug)]
pub(crate) struct Sampler {
    order: Order,
    buckets: Option<Buckets>, // for padded rows
}

impl Sampler {
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
