//! Reads a dataset once, in file order, as evaluations do. Several inputs take turns, so that the first samples come
//! from all of them.

use crate::{DataError, Dataset, MicroBatch, Position};

impl Dataset {
    /// The samples in file order, each once, in micro-batches of `micro_batch` rows, the last of which may have fewer.
    /// `most` limits the number of samples.
    pub fn once(
        &self,
        most: Option<usize>,
    ) -> impl Iterator<Item = Result<MicroBatch, DataError>> + '_ {
        let samples = self.samples().min(most.unwrap_or(usize::MAX));
        let rows = self.options().micro_batch;
        let mut order = self.order(None);
        (0..samples).step_by(rows).map(move |first| {
            let at = |index| Position {
                epoch: 0,
                index: index as u64,
            };
            let taken = (first..samples.min(first + rows)).map(|index| order.sample(at(index)));
            self.read(&taken.collect::<Vec<_>>())
        })
    }
}
