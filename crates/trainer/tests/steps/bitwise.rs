//! Loss and gradient norm have the same bits in every recompute mode, for every number of threads.

use crate::common::side_by_side::side_by_side;
use crate::common::{
    ATTENTIONS, DTYPES, MODES, OF_VARIANTS, VARIANTS, dtypes_and_attentions, every_activation,
    odd_model, parameters, plan, session, settings, step_batch, variants,
};
use memory::{DType, Memory};
use model::{Action, Attention, ModelConfig, Policy, ReplayCounts};
use proptest::prelude::*;
use session::Session;
use settings::Settings;
use std::collections::HashSet;

/// Weights are compared after the last: what differs in any step shows there.
const STEPS: usize = 8;

/// What must be the same, and what must not.
struct Run {
    /// Loss and gradient norm of every step, as bits.
    bits: Vec<(u32, u32)>,
    /// The weights after the last step, as bits.
    weights: Vec<u32>,
    peak_bytes: u64,
    replayed: Option<ReplayCounts>,
    threads: usize,
}

impl Run {
    /// Stages replayed in the last step.
    fn replays(&self) -> usize {
        self.replayed.as_ref().map_or(0, ReplayCounts::total)
    }
}

fn run_session(session: &mut Session, settings: &Settings, steps: usize) -> Run {
    let mut run = Run {
        bits: Vec::new(),
        weights: Vec::new(),
        peak_bytes: 0,
        replayed: None,
        threads: rayon::current_num_threads(),
    };
    for step in 0..steps {
        let outcome = session.step(&step_batch(settings, step)).unwrap();
        assert!(outcome.is_finite());
        run.bits
            .push((outcome.loss.to_bits(), outcome.grad_norm.to_bits()));
        (run.peak_bytes, run.replayed) = (outcome.memory.peak.bytes, Some(outcome.replayed));
    }
    let weights = parameters(session).concat();
    run.weights = weights.into_iter().map(f32::to_bits).collect();
    run
}

fn run(settings: &Settings, steps: usize) -> Run {
    run_session(&mut session(settings), settings, steps)
}

fn in_pool(threads: usize, run: impl FnOnce() -> Run + Send) -> Run {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    pool.build().unwrap().install(run)
}

#[track_caller]
fn assert_same(actual: &Run, expected: &Run, name: &str) {
    assert_eq!(actual.bits, expected.bits, "{name}");
    assert!(actual.weights == expected.weights, "{name}: weights differ");
}

/// Steps that differ from one another: otherwise equal bits say little.
fn assert_varied(bits: &[(u32, u32)]) {
    let different: HashSet<_> = bits.iter().collect();
    assert_eq!(different.len(), bits.len());
}

/// Returns the run that keeps everything.
fn assert_same_in_every_mode(
    name: &str,
    model: &ModelConfig,
    (dtype, attention): (DType, Attention),
) -> Run {
    let run_mode = |mode: &str| {
        let settings = Settings {
            attention,
            ..settings(model.clone(), dtype, mode)
        };
        in_pool(2, || run(&settings, STEPS))
    };
    let runs: Vec<Run> = MODES.into_iter().map(run_mode).collect();
    let (none, others) = runs.split_first().unwrap();
    assert_eq!(none.replays(), 0);
    assert_varied(&none.bits);
    for (mode, other) in MODES[1..].iter().zip(others) {
        assert!(other.peak_bytes < none.peak_bytes, "{name} {mode}");
        assert!(other.replays() > 0, "{name} {mode}");
    }
    for (index, run) in runs.iter().enumerate() {
        for other in &runs[..index] {
            // With norms behind, `full` replays each last product too, as `full:uniform:2` does.
            let may_be_equal = model.norm_placement.is_behind();
            assert!(
                may_be_equal || run.replayed != other.replayed,
                "{name} {}",
                MODES[index]
            );
            assert_ne!(run.peak_bytes, other.peak_bytes, "{name} {}", MODES[index]);
        }
    }
    for (mode, other) in MODES[1..].iter().zip(others) {
        assert_same(
            other,
            none,
            &format!("{name} {dtype:?} {attention:?} {mode}"),
        );
    }
    runs.into_iter().next().unwrap()
}

/// For both kinds of attention, which do differ from each other.
fn assert_same_in_every_mode_of_every_kind(dtype: DType) {
    side_by_side(variants(3), |(name, model)| {
        let of = |attention| assert_same_in_every_mode(name, &model, (dtype, attention));
        let [eager, flash] = ATTENTIONS.map(of);
        assert_ne!(eager.bits, flash.bits, "{name}");
        assert!(flash.peak_bytes < eager.peak_bytes, "{name}");
    });
}

#[test]
fn f32_is_the_same_in_every_mode() {
    assert_same_in_every_mode_of_every_kind(DType::F32);
}

#[test]
fn bf16_is_the_same_in_every_mode() {
    assert_same_in_every_mode_of_every_kind(DType::BF16);
}

#[test]
fn every_number_of_threads_gives_the_same() {
    for (dtype, attention) in dtypes_and_attentions() {
        for (name, model) in variants(3) {
            for mode in ["none", "core_attn,mlp", "full"] {
                let settings = Settings {
                    attention,
                    ..settings(model.clone(), dtype, mode)
                };
                let [one, two, four] =
                    [1, 2, 4].map(|threads| in_pool(threads, || run(&settings, 3)));
                assert_eq!([one.threads, two.threads, four.threads], [1, 2, 4]);
                assert_same(&two, &one, &format!("{name} {dtype:?} {mode}, 2"));
                assert_same(&four, &one, &format!("{name} {dtype:?} {mode}, 4"));
            }
        }
    }
}

/// Products beyond one block of the GEMM in rows, columns and depth.
#[test]
fn products_of_several_blocks_are_the_same() {
    for dtype in DTYPES {
        let model = ModelConfig {
            vocab: 2100,
            ffn: 530,
            ..odd_model(1)
        };
        let with = |mode: &str| Settings {
            seq: 300,
            accum: 1,
            head_chunk: 513,
            ..settings(model.clone(), dtype, mode)
        };
        let (none, full) = (with("none"), with("full"));
        let one = in_pool(1, || run(&none, 2));
        assert_varied(&one.bits);
        for threads in [2, 4] {
            let many = in_pool(threads, || run(&full, 2));
            assert_eq!(many.threads, threads);
            assert_same(&many, &one, &format!("{dtype:?} {threads}"));
        }
    }
}

/// The other side of the above: what does change the arithmetic is seen.
#[test]
fn another_head_chunk_gives_other_bits() {
    let settings = settings(odd_model(2), DType::F32, "none");
    let halved = Settings {
        head_chunk: settings.head_chunk / 2,
        ..settings.clone()
    };
    assert_ne!(run(&settings, STEPS).bits, run(&halved, STEPS).bits);
}

/// Poison reaches the kernels: read before written, it would show.
#[test]
fn poison_is_nan() {
    let memory = Memory::host();
    memory.set_poison(true);
    let leased = memory.lease(memory::Category::Temporary, "x", [3], DType::F32);
    let values = leased.unwrap();
    assert!(values.view().slice::<f32>().iter().all(|x| x.is_nan()));
}

const LAYERS: usize = 4;

/// Any activations of any layers.
fn any_policy() -> impl Strategy<Value = Policy> {
    let activations = every_activation(&variants(LAYERS));
    let all = LAYERS * activations.len();
    proptest::collection::vec(any::<bool>(), all).prop_map(move |dropped| {
        let mut policy = Policy::keep_all_of(OF_VARIANTS, LAYERS);
        for (index, dropped) in dropped.into_iter().enumerate() {
            let (layer, activation) = (index % LAYERS, activations[index / LAYERS]);
            if dropped {
                policy.set(layer, activation, Action::Recompute);
            }
        }
        policy
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_subset_of_activations_gives_the_same(policy in any_policy(), variant in 0usize..VARIANTS) {
        let (name, model) = variants(LAYERS)[variant].clone();
        for (dtype, attention) in dtypes_and_attentions() {
            let none = Settings { attention, ..settings(model.clone(), dtype, "none") };
            let subset = Settings { policy: policy.clone(), ..none.clone() };
            let (expected, actual) = (run(&none, STEPS), run(&subset, STEPS));
            prop_assume!(actual.replays() > 0);
            prop_assert_eq!(&actual.bits, &expected.bits, "{} {:?}", name, dtype);
            prop_assert!(actual.weights == expected.weights, "{} {:?}", name, dtype);
            prop_assert_eq!(actual.peak_bytes, plan(&subset).peak_bytes);
        }
    }
}
