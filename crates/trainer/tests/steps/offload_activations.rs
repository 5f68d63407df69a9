//! Activations that wait on the host: the same bits, the planned bytes in both memories, and less of the device's.

use crate::common::side_by_side::{in_one_thread, side_by_side};
use crate::common::{
    MODES, OF_VARIANTS, VARIANTS, assert_as_planned, dtypes_and_attentions, every_activation,
    odd_model, offloading, parameters, plan, session, settings, step_batch, variants,
};
use kernels::Target;
use memory::{DType, Layer, Phase};
use model::{Action, Attention, ModelConfig, Policy};
use planner::Plan;
use proptest::prelude::*;
use settings::Settings;

/// All labels; together they leave nothing behind.
const EVERYTHING: &str = "block_input,layernorm,qkv,core_attn,attn_value,attn_out,mlp";

/// Labels alone and together.
const LABELS: [&str; 5] = [
    "block_input",
    "mlp",
    "core_attn,layernorm",
    "qkv,attn_value,attn_out,mlp_act",
    EVERYTHING,
];

/// Two rows of 24 tokens, two micro-batches, a head in two chunks.
fn small(model: ModelConfig, dtype: DType, attention: Attention, mode: &str) -> Settings {
    Settings {
        seq: 24,
        head_chunk: 30,
        attention,
        ..settings(model, dtype, mode)
    }
}

/// Loss and gradient norm of every step, and the weights after the last, as bits.
#[derive(PartialEq)]
struct Run {
    bits: Vec<(u32, u32)>,
    weights: Vec<u32>,
}

/// Checks every step's memory and traffic on the way.
fn run(name: &str, settings: &Settings, steps: usize) -> (Run, Plan) {
    in_one_thread(|| run_here(name, settings, steps))
}

fn run_here(name: &str, settings: &Settings, steps: usize) -> (Run, Plan) {
    let (mut session, plan) = (session(settings), plan(settings));
    let mut bits = Vec::new();
    for step in 0..steps {
        let outcome = session.step(&step_batch(settings, step)).unwrap();
        assert_as_planned(name, &plan, &outcome);
        bits.push((outcome.loss.to_bits(), outcome.grad_norm.to_bits()));
    }
    let weights = parameters(&session).concat();
    let weights = weights.into_iter().map(f32::to_bits).collect();
    (Run { bits, weights }, plan)
}

/// Bytes of the activations that a policy does something with.
fn bytes_of(plan: &Plan, action: Action) -> u64 {
    let with = plan.activations.iter().filter(|one| one.action == action);
    with.map(|activation| activation.bytes).sum()
}

/// Bytes as they cross: not rounded to the granularity.
fn exact_bytes_of(plan: &Plan, action: Action) -> u64 {
    let with = plan.activations.iter().filter(|one| one.action == action);
    let bytes = with.map(|one| {
        let elements: usize = one.shape.iter().product();
        elements * if one.dtype == "bf16" { 2 } else { 4 }
    });
    bytes.sum::<usize>() as u64
}

/// The sides of a comparison differ in what they should: what is offloaded crosses there and back, once a
/// micro-batch, takes its place on the host, and frees the device of it, less one layer on its way.
fn assert_offloads(name: &str, settings: &Settings, offloads: &Plan, keeps: &Plan) {
    let crossing = exact_bytes_of(offloads, Action::Offload) * settings.accum as u64;
    assert!(crossing > 0, "{name}");
    assert_eq!(offloads.d2h_bytes, keeps.d2h_bytes + crossing, "{name}");
    assert_eq!(offloads.h2d_bytes, keeps.h2d_bytes + crossing, "{name}");
    let offloaded = bytes_of(offloads, Action::Offload);
    assert_eq!(keeps.host_pinned_bytes, 0, "{name}");
    assert_eq!(offloads.host_pinned_bytes, offloaded, "{name}");
    let falls = keeps.peak_bytes - offloads.peak_bytes;
    let of_layer = |layer: usize| {
        let all = offloads.activations.iter();
        let own = all.filter(|one| one.layer == layer && one.action == Action::Offload);
        own.map(|one| one.bytes).sum::<u64>()
    };
    let layer = (0..settings.model.layers).map(of_layer).max().unwrap();
    assert!(
        (offloaded - layer..=offloaded).contains(&falls),
        "{name}: {falls} of {offloaded}"
    );
}

/// With every mode of recompute that leaves the labels something to send.
#[test]
fn what_is_offloaded_crosses_and_leaves_the_device() {
    let models = variants(3).into_iter().chain([("plain", odd_model(4))]);
    let pairs =
        models.flat_map(|model| dtypes_and_attentions().map(move |pair| (model.clone(), pair)));
    side_by_side(pairs, |((variant, model), (dtype, attention))| {
        let mut compared = 0;
        for mode in MODES {
            let keeps = small(model.clone(), dtype, attention, mode);
            let keeps_plan = plan(&keeps);
            for labels in LABELS {
                let Some(offloads) = offloading(&keeps, labels) else {
                    continue;
                };
                let name = format!("{variant}, {dtype:?}, {attention:?}, {mode}, {labels}");
                assert_offloads(&name, &offloads, &plan(&offloads), &keeps_plan);
                compared += 1;
            }
        }
        assert!(compared > 30, "{compared} pairs of labels and modes");
    });
}

/// What is where, at the largest peaks: in the head everything that is offloaded is away. While the last block is at
/// work, one layer is on its way there or back.
#[test]
fn the_peak_falls_by_what_is_offloaded_less_one_layer_on_its_way() {
    let mut seen = Vec::new();
    for (dtype, attention) in dtypes_and_attentions() {
        for labels in LABELS {
            for (vocab, head_chunk) in [(4099, 48), (17, 8)] {
                let mut keeps = small(odd_model(6), dtype, attention, "none");
                (keeps.model.vocab, keeps.head_chunk) = (vocab, head_chunk);
                let offloads = plan(&offloading(&keeps, labels).unwrap());
                let keeps = plan(&keeps);
                let offloaded = bytes_of(&offloads, Action::Offload);
                let falls = keeps.peak_bytes - offloads.peak_bytes;
                let places = [&keeps, &offloads].map(|plan| (plan.peak_phase, plan.peak_layer));
                let expected = match places.map(|(_, layer)| layer) {
                    [Layer::Head, Layer::Head] => offloaded,
                    [Layer::Block(5), Layer::Block(4 | 5)] => offloaded - offloaded / 5,
                    _ => continue,
                };
                assert_eq!(falls, expected, "{labels} {places:?}");
                seen.push(places[1]);
            }
        }
    }
    assert!(seen.contains(&(Phase::Forward, Layer::Head)), "{seen:?}");
    assert!(
        seen.iter().any(|(phase, _)| *phase == Phase::Backward),
        "{seen:?}"
    );
}

/// In a real model and on a GPU: far more than 95 % of what is offloaded, less the layer on its way.
#[test]
fn a_large_model_needs_less_of_the_device() {
    let model = ModelConfig {
        hidden: 4096,
        layers: 32,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        ffn: 14_336,
        vocab: 128_256,
        ..odd_model(32)
    };
    for (mode, labels) in [
        ("none", EVERYTHING),
        ("core_attn,layernorm", "mlp"),
        ("full", "block_input"),
    ] {
        let keeps = Settings {
            seq: 8192,
            head_chunk: 2048,
            ..small(model.clone(), DType::BF16, Attention::Flash, mode)
        };
        let offloads = offloading(&keeps, labels).unwrap();
        let of = |settings: &Settings| Plan::new(settings, Target::Cuda).unwrap();
        let (keeps, offloads) = (of(&keeps), of(&offloads));
        let offloaded = bytes_of(&offloads, Action::Offload);
        let away = offloaded - offloaded / 31;
        for (before, after) in [
            (keeps.peak_bytes, offloads.peak_bytes),
            (keeps.reserved_bytes, offloads.reserved_bytes),
        ] {
            let falls = before - after;
            let range = away as f64 * 0.95..=offloaded as f64 * 1.01;
            assert!(
                range.contains(&(falls as f64)),
                "{mode}, {labels}: {falls} of {offloaded}"
            );
        }
        assert_eq!(offloads.host_pinned_bytes, offloaded);
    }
}

/// A model with one layer has nothing to send, and its plan says so.
#[test]
fn one_layer_offloads_nothing() {
    let keeps = small(odd_model(1), DType::F32, Attention::Eager, "none");
    let offloads = offloading(&keeps, EVERYTHING).unwrap();
    let (expected, keeps_plan) = run("keeps", &keeps, 3);
    let (actual, offloads_plan) = run("offloads", &offloads, 3);
    assert_eq!(actual.bits, expected.bits);
    assert_eq!(offloads_plan.peak_bytes, keeps_plan.peak_bytes);
    assert_eq!(offloads_plan.host_pinned_bytes, 0);
    assert_eq!(offloads_plan.d2h_bytes, keeps_plan.d2h_bytes);
    let says_so = |plan: &Plan| {
        let mut notes = plan.notes.iter();
        notes.any(|note| note.starts_with("nothing is offloaded"))
    };
    assert!(says_so(&offloads_plan) && !says_so(&keeps_plan));
}

/// A plan makes two micro-batches at most, and counts as many as there are.
#[test]
fn traffic_grows_with_the_micro_batches() {
    let of = |accum: usize| {
        let keeps = small(odd_model(3), DType::F32, Attention::Eager, "none");
        let offloads = offloading(&Settings { accum, ..keeps }, "mlp").unwrap();
        run(&format!("accum {accum}"), &offloads, 2).1.d2h_bytes
    };
    let [one, two, five] = [1, 2, 5].map(of);
    assert_eq!(five - two, 3 * (two - one));
    assert!(two > one);
}

const LAYERS: usize = 4;

/// Any action for any activation of any layer: replays then read what is still away.
fn any_policy() -> impl Strategy<Value = Policy> {
    let activations = every_activation(&variants(LAYERS));
    let all = LAYERS * activations.len();
    proptest::collection::vec(0usize..3, all).prop_map(move |actions| {
        let mut policy = Policy::keep_all_of(OF_VARIANTS, LAYERS);
        for (index, action) in actions.into_iter().enumerate() {
            let (layer, activation) = (index % LAYERS, activations[index / LAYERS]);
            let action = [Action::Keep, Action::Recompute, Action::Offload][action];
            policy.set(layer, activation, action);
        }
        policy
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_actions_give_the_same(policy in any_policy(), variant in 0usize..VARIANTS) {
        let (name, model) = variants(LAYERS)[variant].clone();
        for (dtype, attention) in dtypes_and_attentions() {
            let keeps = small(model.clone(), dtype, attention, "none");
            let mixed = Settings { policy: policy.clone(), ..keeps.clone() };
            let (expected, keeps_plan) = run(name, &keeps, 3);
            let (actual, plan) = run(name, &mixed, 3);
            prop_assume!(plan.d2h_bytes > keeps_plan.d2h_bytes && plan.peak_bytes < keeps_plan.peak_bytes);
            prop_assert_eq!(&actual.bits, &expected.bits, "{} {:?}", name, dtype);
            prop_assert!(actual.weights == expected.weights, "{} {:?}", name, dtype);
        }
    }
}
