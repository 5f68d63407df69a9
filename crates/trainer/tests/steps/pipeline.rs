//! Pipelines: what deferred gradients need, and sums that are added up once a step.

use crate::common::elsewhere::{forms, with_form};
use crate::common::plan;
use crate::common::ranks::{each, of_rank, on_cpu, ranks, together};
use crate::common::variants;
use memory::{DType, Rank};
use settings::{Pipeline, PipelineSchedule, Settings};
use std::ops::Range;
use units::{Ranks, Reduce, Zero};

const STEPS: usize = 2;

/// Two groups of ranks in each stage of a pipeline, which has these blocks.
fn in_stages(
    layers: &[Range<usize>],
    schedule: PipelineSchedule,
    zero: Zero,
    reduce: Reduce,
) -> Settings {
    let [(_, biases), ..] = variants(4);
    let stage = Rank {
        number: 0,
        of: layers.len(),
    };
    let pipeline = Pipeline {
        schedule,
        layers: layers.to_vec(),
        stages: stage.of,
    };
    Settings {
        micro_batch: 1,
        seq: 12,
        accum: 4,
        ranks: Some(Ranks {
            stage,
            reduce,
            ..ranks(2, zero)
        }),
        pipeline: (stage.of > 1).then_some(pipeline),
        ..with_form(biases, forms()[0], "full", DType::F32)
    }
}

/// Under zb-h1 the last stage keeps what deferred gradients are computed from. The first stage defers none.
#[test]
fn what_deferred_gradients_need_is_planned() {
    let peak = |schedule, rank| {
        let settings = in_stages(&[0..1, 1..4], schedule, Zero::Gradients, Reduce::MicroBatch);
        plan(&of_rank(&settings, rank)).peak_bytes
    };
    let [later, at_once] = [
        PipelineSchedule::ZbH1,
        PipelineSchedule::OneForwardOneBackward,
    ];
    assert_eq!(peak(later, 0), peak(at_once, 0));
    assert!(peak(later, 2) > peak(at_once, 2));
}

#[test]
fn deferred_gradients_that_are_added_up_once_a_step_have_the_same_bits() {
    for zero in [Zero::Replicated, Zero::States] {
        let of = |layers: &[Range<usize>], reduce| {
            let settings = in_stages(layers, PipelineSchedule::ZbH1, zero, reduce);
            together(&each(&format!("{zero:?}"), &settings, STEPS, on_cpu))
        };
        let (whole, thirds) = (Vec::from_iter(std::iter::once(0..4)), [0..1, 1..3, 3..4]);
        let expected = of(&whole, Reduce::Step);
        assert!(of(&thirds, Reduce::Step) == expected, "{zero:?}");
        assert!(of(&whole, Reduce::MicroBatch) != expected, "{zero:?}");
    }
}
