//! Steps whose tokens are all zero, for sessions that compute nothing.

use data::{MicroBatch, Packing, StepBatch, padded_lengths};
use settings::Settings;

/// The second micro-batch meets what the first leaves behind; later ones meet the same.
pub const MICRO_BATCHES_MAX: usize = 2;

/// A step of sequences of `seq` tokens, of at most [`MICRO_BATCHES_MAX`] micro-batches, with nothing in it: for sessions
/// that compute nothing. Those of other ranks have no rows.
pub fn shape_of_a_step(settings: &Settings, seq: usize) -> StepBatch {
    shape_of_micro_batches(settings, &vec![seq; settings.accum.min(MICRO_BATCHES_MAX)])
}

/// A step in which this rank's micro-batches have these lengths; else as [`shape_of_a_step`].
pub fn shape_of_micro_batches(settings: &Settings, lengths: &[usize]) -> StepBatch {
    let rank = settings.rank();
    let rows = |number: usize| match number % rank.of == rank.number {
        true => settings.micro_batch,
        false => 0,
    };
    let numbers = 0..lengths.len() * rank.of;
    let shape = |number| shape_of_a_micro_batch(settings, rows(number), lengths[number / rank.of]);
    numbers.map(shape).collect()
}

/// The lengths of micro-batches, the longest first.
pub(crate) fn lengths(settings: &Settings) -> Vec<usize> {
    match settings.packing {
        Packing::Pad => {
            let mut lengths: Vec<usize> = padded_lengths(settings.seq).collect();
            lengths.reverse();
            lengths
        }
        Packing::Concatenate | Packing::FirstFit => vec![settings.seq],
    }
}

/// A micro-batch of `rows` sequences of `seq` tokens, with nothing in it.
pub fn shape_of_a_micro_batch(settings: &Settings, rows: usize, seq: usize) -> MicroBatch {
    MicroBatch {
        input_ids: vec![0; rows * seq],
        targets: vec![0; rows * seq],
        rows,
        seq,
        documents: (settings.packing == Packing::FirstFit).then(|| vec![0; rows * seq]),
    }
}
