//! Steps whose tokens are all zero, for sessions that compute nothing.

use data::{BesideTargets, MicroBatch, Packing, PolicyTargets, StepBatch, padded_lengths};
use memory::Rank;
use settings::{Settings, StepObjective};

/// A step on shapes makes two: the second finds what the first leaves behind, and so do all later ones.
pub const MICRO_BATCHES_MAX: usize = 2;

/// Micro-batches of a rank in a step on shapes: at most [`MICRO_BATCHES_MAX`], but all in a pipeline, where each may find other places
/// free in the slab.
pub fn micro_batches_on_shapes(settings: &Settings) -> usize {
    match settings.pipeline {
        None => few_micro_batches(settings),
        Some(_) => settings.accum,
    }
}

/// Enough micro-batches of a rank for the peak of a whole step ([`settings::PipelineOrder::few`]).
pub fn few_micro_batches(settings: &Settings) -> usize {
    let order = settings.pipeline_order();
    order.few(settings.stage(), settings.accum)
}

/// An empty step with sequences of `seq` tokens and [`micro_batches_on_shapes`], for sessions that compute nothing. Other ranks'
/// micro-batches have no rows.
pub fn shape_of_a_step(settings: &Settings, seq: usize) -> StepBatch {
    shape_of_micro_batches(settings, &vec![seq; micro_batches_on_shapes(settings)])
}

/// The same, with the given lengths of this rank's micro-batches.
pub fn shape_of_micro_batches(settings: &Settings, lengths: &[usize]) -> StepBatch {
    let (rank, parts) = (settings.rank(), settings.own_parts());
    let rows = |by: usize| match by % rank.of == rank.number {
        true => settings.micro_batch,
        false => 0,
    };
    let shape = |number: usize| {
        let part = Rank {
            number: number % parts.of,
            of: parts.of,
        };
        let by = number / parts.count;
        shape_of_a_part(settings, rows(by), lengths[by / rank.of], part)
    };
    let all = lengths.len() * rank.of * parts.count;
    (0..all).map(shape).collect()
}

/// The possible lengths of micro-batches, the longest first.
pub(crate) fn lengths(settings: &Settings) -> Vec<usize> {
    match settings.packing {
        Packing::Pad => padded_lengths(settings.seq).rev().collect(),
        Packing::Auto | Packing::Concatenate | Packing::FirstFit => vec![settings.seq],
    }
}

/// An empty micro-batch of `rows` sequences of `seq` tokens.
pub fn shape_of_a_micro_batch(settings: &Settings, rows: usize, seq: usize) -> MicroBatch {
    shape_of_a_part(settings, rows, seq, Rank::ALONE)
}

/// One part of each of its sequences.
fn shape_of_a_part(settings: &Settings, rows: usize, seq: usize, part: Rank) -> MicroBatch {
    let tokens = rows * seq / part.of;
    MicroBatch {
        input_ids: vec![0; tokens],
        targets: vec![0; tokens],
        rows,
        seq: seq / part.of,
        part,
        documents: (settings.packing == Packing::FirstFit).then(|| vec![0; rows * seq]),
        lengths: (settings.packing != Packing::Concatenate).then(|| vec![seq as i32; rows]),
        beside: match settings.objective {
            StepObjective::Policy => Some(BesideTargets::Policy(PolicyTargets::uncounted(tokens))),
            objective => objective
                .has_reference()
                .then(|| BesideTargets::Reference(vec![0.0; rows])),
        },
    }
}
