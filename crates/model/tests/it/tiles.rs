//! Stages on tiles of tokens: against autograd, less memory, and the same bits whatever becomes of activations.

use crate::common::harness::{Outcome, Run, SHAPE, assert_agrees};
use model::{Architecture, Attention, ModelConfig, OffloadLabels, Policy};

const LAYERS: usize = 3;
const KINDS: [Attention; 2] = [Attention::Eager, Attention::Flash];

/// Parts of a sequence of 13 that do and do not divide it, a sequence, both.
const TILES: [usize; 5] = [1, 5, 13, 20, 26];

/// A model of each kind of block.
fn models() -> [(&'static str, ModelConfig); 3] {
    let llama = r#"{"hidden": 20, "layers": 3, "heads": 2, "kv_heads": 1, "head_dim": 6, "ffn": 44, "vocab": 31}"#;
    let qwen3 = r#"{"hidden": 20, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 6, "ffn": 44, "vocab": 31,
        "qk_norm": true, "qkv_bias": true, "o_bias": true, "tie_embeddings": true}"#;
    let gpt2 = r#"{"hidden": 20, "layers": 3, "heads": 4, "kv_heads": 4, "head_dim": 5, "ffn": 66, "vocab": 31,
        "tie_embeddings": true, "norm": "layer", "activation": "gelu_tanh", "positions": "learned",
        "max_positions": 17, "biases": true, "dropout": 0.25}"#;
    let of = |name, text| {
        let config: ModelConfig = serde_json::from_str(text).unwrap();
        config.validate().unwrap();
        (name, config)
    };
    [of("Llama", llama), of("Qwen3", qwen3), of("GPT-2", gpt2)]
}

fn architecture(config: &ModelConfig, kind: Attention, tokens: Option<usize>) -> Architecture {
    Architecture::of(config, kind).in_tiles(tokens)
}

#[test]
fn they_agree_with_autograd() {
    for (_, config) in models() {
        for kind in KINDS {
            for tokens in TILES {
                let architecture = architecture(&config, kind, Some(tokens));
                let mut run = Run::on_cpu(architecture, &Policy::keep_all(LAYERS));
                run.pass(1, false);
                assert_agrees(&run, &config, false);
            }
        }
    }
}

/// What exists on tiles alone is not among the activations that a policy decides about, but for what tiles hand on.
#[test]
fn what_stays_whole_is_what_runs_hand_on() {
    let names = |config: &ModelConfig, tokens| {
        let architecture = architecture(config, Attention::Flash, tokens);
        let activations = architecture.blocks[0].activations();
        activations
            .map(|(activation, _)| activation.name())
            .collect::<Vec<_>>()
    };
    for (name, config) in models() {
        let whole = ["x", "q", "k", "v", "o", "lse", "x2"];
        assert_eq!(names(&config, Some(5)), whole, "{name}");
        assert!(names(&config, None).len() > whole.len(), "{name}");
    }
}

/// Trains on the processor as planned on shapes.
fn trained(
    config: &ModelConfig,
    (kind, tokens): (Attention, Option<usize>),
    policy: &Policy,
) -> Outcome {
    let architecture = || architecture(config, kind, tokens);
    let planned = Run::on_shapes(architecture(), policy).train(2);
    let made = Run::on_cpu(architecture(), policy).train(4);
    assert_eq!(made.peak_bytes, planned.peak_bytes, "{kind:?} {tokens:?}");
    assert_eq!(made.replayed, planned.replayed, "{kind:?} {tokens:?}");
    made
}

fn values(bits: &[u32]) -> impl Iterator<Item = f32> {
    bits.iter().map(|bits| f32::from_bits(*bits))
}

/// Dropout included: a tile drops what the whole micro-batch would.
#[test]
fn steps_are_those_of_whole_micro_batches_but_for_rounding() {
    for (name, config) in models() {
        let policy = Policy::parse("full", LAYERS).unwrap();
        let whole = trained(&config, (Attention::Flash, None), &policy);
        for tokens in TILES {
            let tiled = trained(&config, (Attention::Flash, Some(tokens)), &policy);
            if tokens < SHAPE.seq {
                assert!(tiled.peak_bytes < whole.peak_bytes, "{name} {tokens}");
            }
            for of in [
                |run: &Outcome| run.losses.clone(),
                |run: &Outcome| run.weights.clone(),
            ] {
                let (tiled, whole) = (of(&tiled), of(&whole));
                let mut pairs = values(&tiled).zip(values(&whole));
                let is_near = |(a, b): (f32, f32)| (a - b).abs() <= 1e-5 * b.abs().max(1.0);
                assert!(pairs.all(is_near), "{name} {tokens}");
            }
        }
    }
}

#[test]
fn bits_are_the_same_under_every_policy() {
    for (name, config) in models() {
        for kind in KINDS {
            let trained = |policy: &Policy| trained(&config, (kind, Some(5)), policy);
            let keeps = trained(&Policy::keep_all(LAYERS));
            let same = |other: &Outcome, policy: &str| {
                let is_same = (&other.losses, &other.weights) == (&keeps.losses, &keeps.weights);
                assert!(is_same, "{name} {kind:?} {policy}");
            };
            for spec in [
                "core_attn",
                "qkv",
                "attn_out",
                "full",
                "full:uniform:2",
                "full:block:1",
            ] {
                let other = trained(&Policy::parse(spec, LAYERS).unwrap());
                assert_ne!(other.replayed, keeps.replayed, "{name} {kind:?} {spec}");
                assert!(
                    other.peak_bytes < keeps.peak_bytes,
                    "{name} {kind:?} {spec}"
                );
                same(&other, spec);
            }
            // They name what exists on tiles alone.
            for spec in ["layernorm", "mlp", "mlp_act"] {
                assert_eq!(
                    trained(&Policy::parse(spec, LAYERS).unwrap()),
                    keeps,
                    "{spec}"
                );
            }
            for labels in ["block_input", "qkv,attn_out", "core_attn,attn_value"] {
                let labels = OffloadLabels::parse(labels).unwrap();
                let other = trained(&Policy::keep_all(LAYERS).offload(&labels).unwrap());
                assert!(
                    other.traffic.d2h_bytes > keeps.traffic.d2h_bytes,
                    "{name} {labels}"
                );
                same(&other, &labels.to_string());
            }
        }
    }
}
