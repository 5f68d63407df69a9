//! GPT-2 against candle's autograd in f64; and dropout, whose masks every replay makes again.

use crate::common::harness::{Outcome, Run, assert_agrees, tokens};
use model::{Architecture, Attention, ModelConfig, OffloadLabels, Policy};

const LAYERS: usize = 3;
const KINDS: [Attention; 2] = [Attention::Eager, Attention::Flash];

fn config(dropout: f64) -> ModelConfig {
    let text = format!(
        r#"{{"hidden": 20, "layers": {LAYERS}, "heads": 4, "kv_heads": 4, "head_dim": 5, "ffn": 33, "vocab": 31,
            "tie_embeddings": true, "norm": "layer", "activation": "gelu_tanh", "positions": "learned",
            "max_positions": 17, "biases": true, "dropout": {dropout}}}"#
    );
    let config: ModelConfig = serde_json::from_str(&text).unwrap();
    config.validate().unwrap();
    config
}

fn architecture(dropout: f64, kind: Attention) -> Architecture {
    Architecture::of(&config(dropout), kind)
}

#[test]
fn it_agrees_with_autograd() {
    for kind in KINDS {
        let mut run = Run::on_cpu(architecture(0.0, kind), &Policy::keep_all(LAYERS));
        run.pass(1, true);
        assert_agrees(&run, &config(0.0), false);
    }
}

/// Trains on the processor as planned on shapes.
fn trained(kind: Attention, dropout: f64, policy: &Policy, name: &str) -> Outcome {
    let planned = Run::on_shapes(architecture(dropout, kind), policy).train(2);
    let made = Run::on_cpu(architecture(dropout, kind), policy).train(4);
    assert_eq!(made.peak_bytes, planned.peak_bytes, "{kind:?} {name}");
    assert_eq!(made.replayed, planned.replayed, "{kind:?} {name}");
    made
}

#[test]
fn dropout_gives_the_same_bits_under_every_policy() {
    for kind in KINDS {
        let keeps = trained(kind, 0.3, &Policy::keep_all(LAYERS), "none");
        let without = trained(kind, 0.0, &Policy::keep_all(LAYERS), "no dropout");
        assert_ne!(keeps.losses, without.losses, "dropout changes the loss");
        let specs = [
            "layernorm",
            "qkv",
            "core_attn",
            "attn_out",
            "mlp",
            "mlp_act",
            "core_attn,layernorm,mlp",
            "full",
            "full:uniform:2",
            "full:block:2",
        ];
        for spec in specs {
            let policy = Policy::parse(spec, LAYERS).unwrap();
            let made = trained(kind, 0.3, &policy, spec);
            assert!(made.replayed.total() > 0, "{kind:?} {spec}");
            assert_eq!(
                (&made.losses, &made.weights),
                (&keeps.losses, &keeps.weights),
                "{spec}"
            );
        }
        for labels in [
            "block_input",
            "layernorm,qkv,core_attn",
            "attn_value,attn_out,mlp",
        ] {
            let labels = OffloadLabels::parse(labels).unwrap();
            let policy = Policy::keep_all(LAYERS).offload(&labels).unwrap();
            let made = trained(kind, 0.3, &policy, &labels.to_string());
            assert!(
                made.traffic.d2h_bytes > keeps.traffic.d2h_bytes,
                "{kind:?} {labels}"
            );
            assert_eq!(
                (&made.losses, &made.weights),
                (&keeps.losses, &keeps.weights),
                "{labels}"
            );
        }
    }
}

#[test]
fn eager_and_flash_drop_the_same() {
    let loss = |kind| {
        let mut run = Run::on_cpu(architecture(0.3, kind), &Policy::keep_all(LAYERS));
        run.pass(1, true);
        f64::from(run.loss())
    };
    let (eager, flash) = (loss(Attention::Eager), loss(Attention::Flash));
    assert!((eager / flash - 1.0).abs() < 1e-5, "{eager} {flash}");
}

/// The same tokens twice: as micro-batches of one step, in other steps and under other seeds their masks differ.
#[test]
fn masks_differ_from_micro_batch_to_micro_batch() {
    let mut run = Run::on_cpu(
        architecture(0.3, Attention::Flash),
        &Policy::keep_all(LAYERS),
    );
    let mut loss = |seed, step, micro_batch| {
        let randomness = model::Randomness {
            seed,
            step,
            micro_batch,
        };
        run.pass_of(&tokens(1), Some(randomness));
        run.loss().to_bits()
    };
    let first = loss(7, 1, 0);
    assert_eq!(
        loss(7, 1, 0),
        first,
        "the same micro-batch has the same mask"
    );
    assert_ne!(loss(7, 1, 1), first);
    assert_ne!(loss(7, 2, 0), first);
    assert_ne!(loss(8, 1, 0), first);
}

#[test]
fn evaluation_drops_nothing() {
    let loss = |dropout, is_training| {
        let mut run = Run::on_cpu(
            architecture(dropout, Attention::Eager),
            &Policy::keep_all(LAYERS),
        );
        run.pass(1, is_training);
        run.loss().to_bits()
    };
    assert_eq!(loss(0.3, false), loss(0.0, true));
    assert_ne!(loss(0.3, true), loss(0.0, true));
}
