//! Makes steps from samples.

use crate::{DataError, Dataset, Packing, Position, StepBatch, buckets::Buckets, mix::Order};
use memory::OwnParts;

/// An error message names this many samples, and only counts the others.
const SAMPLES_NAMED: usize = 8;

/// The endless, deterministic sequence of a dataset's steps.
///
/// A step takes `accum` micro-batches of `micro_batch` samples, in order. When an epoch ends, the next one begins, even
/// within a micro-batch, so no sample is dropped. Samples come in the order of the file, or shuffled. With
/// [`Packing::Pad`], samples of similar length are brought together within windows of that order.
#[derive(Debug)]
pub struct Batches {
    dataset: Dataset,
    order: Order,
    buckets: Option<Buckets>, // for padded rows
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
        let (options, samples) = (dataset.options(), dataset.samples());
        let seed = options.shuffle.then_some(options.seed);
        let together = options.rows_together();
        let (rows, samples) = (options.micro_batch / together, samples / together);
        Self {
            order: dataset.order(seed),
            buckets: (options.packing == Packing::Pad).then(|| Buckets::new(rows, samples, seed)),
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
    pub fn seek(&mut self, position: Position) -> Result<(), DataError> {
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
    pub fn next_step(&mut self) -> Result<StepBatch, DataError> {
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
                taken.push(self.sample(position));
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
            return Err(DataError::NoTargets {
                file: self.dataset.name(),
                samples: list(&taken),
                epoch: self.position.epoch,
            });
        }
        self.position = position;
        Ok(match self.parts {
            OwnParts::WHOLE => step,
            parts => step.in_parts(parts),
        })
    }

    /// The sample at a position. The samples of a pair follow each other, and the order is that of pairs.
    fn sample(&mut self, at: Position) -> usize {
        let together = self.dataset.options().rows_together();
        let first = Position {
            index: at.index / together as u64,
            ..at
        };
        let length = |group: usize| {
            let samples = group * together..(group + 1) * together;
            let lengths = samples.map(|sample| self.dataset.length(sample));
            lengths.max().unwrap_or(0)
        };
        let group = match &mut self.buckets {
            None => self.order.sample(first),
            Some(buckets) => buckets.sample(first, &mut self.order, length),
        };
        group * together + at.index as usize % together
    }
}

/// The numbers of the first few samples, and the count of the others.
fn list(samples: &[usize]) -> String {
    let (named, rest) = samples.split_at(samples.len().min(SAMPLES_NAMED));
    let named: Vec<_> = named.iter().map(usize::to_string).collect();
    match rest.len() {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}
