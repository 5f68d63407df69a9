//! A dataset read once, in file order: what an evaluation takes.

use crate::{DataError, Dataset, MicroBatch};

impl Dataset {
    /// Its samples in file order, each once: micro-batches of `micro_batch` rows, the last of which may have fewer. Where
    /// `most` says so, no more than the first samples.
    pub fn once(
        &self,
        most: Option<usize>,
    ) -> impl Iterator<Item = Result<MicroBatch, DataError>> + '_ {
        let samples = self.samples().min(most.unwrap_or(usize::MAX));
        let rows = self.options().micro_batch;
        (0..samples).step_by(rows).map(move |first| {
            let taken: Vec<usize> = (first..samples.min(first + rows)).collect();
            self.read(&taken)
        })
    }
}
