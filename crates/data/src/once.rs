//! A dataset read once, in file order: what an evaluation takes. Several inputs take turns, so that the first samples
//! are from all of them.

use crate::{DataError, Dataset, MicroBatch, Position};

impl Dataset {
    /// Its samples in file order, each once: micro-batches of `micro_batch` rows, the last of which may have fewer. Where
    /// `most` says so, no more than the first samples.
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
