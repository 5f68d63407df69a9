//! Stages on tiles of tokens (`memory.tile_tokens`): less memory, as planned, and what whole micro-batches give but for
//! rounding.

use crate::common::side_by_side::side_by_side;
use crate::common::{
    assert_as_planned, config, odd_model, parameters, plan, session, settings, step_batch, variants,
};
use memory::{DType, Memory};
use model::{Attention, ModelConfig, OffloadLabels};
use session::{Session, SessionError};
use settings::Settings;

const STEPS: usize = 3;

/// Sequences of 71 tokens: tiles of parts that do not divide one, of one, and of both.
const TILES: [usize; 3] = [16, 71, 150];

/// What a run computed, and its peak in the last step.
struct Run {
    losses: Vec<f32>,
    norms: Vec<f32>,
    weights: Vec<f32>,
    peak_bytes: u64,
}

fn run(settings: &Settings) -> Run {
    let (plan, mut session) = (plan(settings), session(settings));
    let mut run = Run {
        losses: Vec::new(),
        norms: Vec::new(),
        weights: Vec::new(),
        peak_bytes: plan.peak_bytes,
    };
    for step in 0..STEPS {
        let outcome = session.step(&step_batch(settings, step)).unwrap();
        assert_as_planned(&format!("{:?}", settings.tile_tokens), &plan, &outcome);
        run.losses.push(outcome.loss);
        run.norms.push(outcome.grad_norm);
    }
    run.weights = parameters(&session).concat();
    run
}

fn in_tiles(settings: &Settings, tokens: usize) -> Settings {
    Settings {
        tile_tokens: Some(tokens),
        ..settings.clone()
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// With one sequence in a micro-batch and with two, dropout included.
#[test]
fn loss_and_gradients_are_those_of_whole_micro_batches_but_for_rounding() {
    side_by_side(variants(2), |(name, model)| {
        for rows in [1, 2] {
            let whole = Settings {
                micro_batch: rows,
                attention: Attention::Flash,
                ..settings(model.clone(), DType::F32, "full")
            };
            let expected = run(&whole);
            for tokens in TILES {
                let name = format!("{name}, {rows} rows, {tokens}");
                let made = run(&in_tiles(&whole, tokens));
                if tokens < rows * whole.seq {
                    assert!(made.peak_bytes < expected.peak_bytes, "{name}");
                    assert_ne!(bits(&made.weights), bits(&expected.weights), "{name}");
                }
                let near = |a: &[f32], b: &[f32], tolerance: f32| {
                    let is_near =
                        |(a, b): (&f32, &f32)| (a - b).abs() <= tolerance * b.abs().max(0.1);
                    assert!(a.iter().zip(b).all(is_near), "{name}");
                };
                near(&made.losses, &expected.losses, 1e-5);
                near(&made.norms, &expected.norms, 1e-4);
            }
        }
    });
}

/// Documents of 20 tokens, or what is left of a sequence: positions and attention begin anew with each.
#[test]
fn documents_are_packed_into_tiles_too() {
    let whole = Settings {
        attention: Attention::Flash,
        ..settings(odd_model(2), DType::F32, "none")
    };
    let losses = |settings: &Settings, packed: bool| {
        let mut session = Session::on_cpu(settings.clone(), &Memory::host()).unwrap();
        session.initialise(7).unwrap();
        let mut batch = step_batch(settings, 0);
        for micro in batch.micro.iter_mut().filter(|_| packed) {
            let tokens = 0..micro.rows * micro.seq;
            let start = |token: usize| (token % micro.seq / 20 * 20) as i32;
            micro.documents = Some(tokens.map(start).collect());
        }
        let step = session.step(&batch).unwrap();
        let micro = batch.micro.into_iter().map(Ok::<_, SessionError>);
        let evaluation = session.forward().unwrap().evaluate(micro).unwrap();
        [step.loss, step.grad_norm, evaluation.loss() as f32]
    };
    let expected = losses(&whole, true);
    for tokens in TILES {
        let made = losses(&in_tiles(&whole, tokens), true);
        let is_near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * b.abs();
        let is_as_expected = made.iter().zip(&expected).all(is_near);
        assert!(is_as_expected, "{tokens}: {made:?} or {expected:?}");
    }
    assert_ne!(losses(&in_tiles(&whole, 16), false)[0], expected[0]);
}

#[test]
fn what_exists_in_tiles_alone_is_not_offloaded() {
    let config = config(odd_model(3), DType::F32, "none");
    let refusal = |set: &[&str]| {
        let set: Vec<String> = set.iter().map(ToString::to_string).collect();
        let settings = Settings::new(&config.with(&set).unwrap());
        settings.err().map(|error| error.to_string())
    };
    for (label, set) in [
        ("mlp", "offload.activations=mlp,qkv"),
        ("mlp_act", "offload.activations=mlp_act"),
        (
            "layernorm",
            "recompute.layers={\"1\"=\"offload: layernorm\"}",
        ),
    ] {
        assert_eq!(refusal(&[set]), None);
        let message = refusal(&[set, "memory.tile_tokens=16"]).unwrap();
        let expected = format!("`{label}` cannot be offloaded: under memory.tile_tokens");
        assert!(message.contains(&expected), "{message}");
    }
    for set in [
        "offload.activations=qkv,attn_out",
        "recompute.spec=layernorm,mlp",
    ] {
        assert_eq!(refusal(&[set, "memory.tile_tokens=16"]), None);
    }
}

/// A micro-batch of 4 s tokens needs for what is whole four times as much, and for its tiles the same: the peak is a line
/// in s, as the memory of attention's backward pass is.
#[test]
fn the_peak_is_a_line_in_the_tokens() {
    let model = ModelConfig {
        vocab: 64,
        ffn: 4 * 52,
        ..odd_model(4)
    };
    let peak = |seq: usize, tokens: Option<usize>| {
        let labels = OffloadLabels::parse("block_input").unwrap();
        let settings = settings(model.clone(), DType::BF16, "full");
        let settings = Settings {
            seq,
            micro_batch: 1,
            accum: 1,
            attention: Attention::Flash,
            policy: settings.policy.clone().offload(&labels).unwrap(),
            tile_tokens: tokens,
            ..settings
        };
        let plan = planner::Plan::new(&settings, kernels::Target::Cuda).unwrap();
        (plan.peak_bytes - plan.persistent_bytes) as f64
    };
    let [short, long, longer] = [1 << 16, 1 << 18, 1 << 20].map(|seq| peak(seq, Some(1 << 10)));
    let per_token = (longer - long) / (3 << 18) as f64;
    let of_tiles = short - per_token * (1 << 16) as f64;
    assert!((long - (of_tiles + per_token * (1 << 18) as f64)).abs() < 1e4);
    // x, its gradient and the next x; q, o and theirs; k, v and theirs; log-sum-exp and row sums in f32; the token's id and
    // target.
    let (hidden, q, kv) = (model.hidden, model.q_width(), model.kv_width());
    let bf16 = 2 * (3 * hidden + 4 * q + 4 * kv);
    let expected = (bf16 + 4 * 2 * model.heads + 4 * 2) as f64;
    assert!(
        (per_token - expected).abs() < 1e-3,
        "{per_token} or {expected}"
    );
    assert!(peak(1 << 18, None) > 1.5 * long);
}
