//! Reads a dataset once, in file order, as evaluations do. Several inputs take turns, so that the first samples come
//! from all of them.

use crate::{Dataset, MicroBatch, Position, Result};

impl Dataset {
    /// The samples in file order, each once, in micro-batches of `micro_batch` rows, the last of which may have fewer.
    /// `most` limits the number of samples.
    pub fn once(&self, most: Option<usize>) -> impl Iterator<Item = Result<MicroBatch>> + '_ {
        let samples = self.samples().min(most.unwrap_or(usize::MAX));
        let rows = self.options().micro_batch;
        let mut order = self.order(None);
        let together = self.options().rows_together();
        (0..samples).step_by(rows).map(move |first| {
            let at = |index| Position {
                epoch: 0,
                index: index as u64,
            };
            let taken = (first..samples.min(first + rows))
                .map(|index| order.sample(at(index / together)) * together + index % together);
            self.read(&taken.collect::<Vec<_>>())
        })
    }

    /// All samples of all inputs by their numbers, in micro-batches as [`Dataset::once`] has them.
    pub fn by_number(&self) -> impl Iterator<Item = Result<MicroBatch>> + '_ {
        let samples = self.rows();
        let rows = self.options().micro_batch;
        let firsts = (0..samples).step_by(rows);
        firsts.map(move |first| {
            let taken = first..samples.min(first + rows);
            self.read(&taken.collect::<Vec<_>>())
        })
    }
}
