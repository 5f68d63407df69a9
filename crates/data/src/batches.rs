//! Makes steps from samples.

use crate::{DataError, Dataset, Position, Result, StepBatch, sample_order::SampleOrder};
use memory::OwnParts;

/// The endless, deterministic sequence of a dataset's steps.
///
/// A step takes `accum` micro-batches of `micro_batch` samples, in order. When an epoch ends, the next one begins, even
/// within a micro-batch, so no sample is dropped. Samples come in the order of the file, or shuffled. With
/// [`Packing::Pad`](crate::Packing::Pad), samples of similar length are brought together within windows of that order.
#[derive(Debug)]
pub struct Batches {
    dataset: Dataset,
    samples: SampleOrder,
    position: Position,
    member: (usize, usize), // this rank of those that read other sequences, and how many there are
    parts: OwnParts,        // what this rank has of each sequence
}

impl Dataset {
    /// The steps of this dataset, from the beginning.
    pub fn batches(self) -> Batches {
        Batches::new(self)
    }
}

impl Batches {
    fn new(dataset: Dataset) -> Self {
        Self {
            samples: SampleOrder::new(&dataset),
            dataset,
            position: Position::default(),
            member: (0, 1),
            parts: OwnParts::WHOLE,
        }
    }

    /// The same steps, with this rank reading every `size`-th micro-batch, from number `rank` on. The others have a
    /// shape but no tokens, so only all ranks together know whether a step has a target.
    #[must_use]
    pub fn of_rank(self, rank: usize, size: usize) -> Self {
        Self {
            member: (rank, size),
            ..self
        }
    }

    /// The same steps where sequences have parts ([`StepBatch::in_parts`]): each rank reads its sequences whole, and keeps these parts.
    #[must_use]
    pub fn in_parts(self, parts: OwnParts) -> Self {
        Self { parts, ..self }
    }

    /// The dataset that the steps come from.
    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// The position at which the next step begins.
    pub fn position(&self) -> Position {
        self.position
    }

    /// Continues at a position that [`Self::position`] returned before: the steps are those that followed it then.
    ///
    /// # Errors
    ///
    /// [`DataError::NoSuchPosition`] if the dataset has fewer samples; the position is then unchanged.
    pub fn seek(&mut self, position: Position) -> Result {
        let samples = self.dataset.samples() as u64;
        if position.index >= samples {
            return Err(DataError::NoSuchPosition {
                file: self.dataset.name(),
                epoch: position.epoch,
                index: position.index,
                samples,
            });
        }
        self.position = position;
        Ok(())
    }

    /// Reads the next step.
    ///
    /// # Errors
    ///
    /// For a token outside the vocabulary and, without other ranks, for a step without any target. The position is then
    /// unchanged, so calling again gives the same error.
    pub fn next_step(&mut self) -> Result<StepBatch> {
        let (rows, accum) = {
            let options = self.dataset.options();
            (options.micro_batch, options.accum)
        };
        let samples = self.dataset.samples() as u64;
        let mut position = self.position;
        let mut micro = Vec::with_capacity(accum);
        let mut taken = Vec::with_capacity(rows * accum);
        let (rank, size) = self.member;
        for number in 0..accum {
            let first = taken.len();
            for _ in 0..rows {
                taken.push(self.samples.sample(&self.dataset, position));
                position = position.next(samples);
            }
            let samples = &taken[first..];
            micro.push(match number % size == rank {
                true => self.dataset.read(samples)?,
                false => self.dataset.shape(samples),
            });
        }
        let step = StepBatch::from_iter(micro);
        if size == 1 && step.target_count() == 0 {
            return Err(self.dataset.no_targets(&taken, self.position.epoch));
        }
        self.position = position;
        Ok(match self.parts {
            OwnParts::WHOLE => step,
            parts => step.in_parts(parts),
        })
    }
}
