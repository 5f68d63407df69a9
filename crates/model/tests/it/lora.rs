//! Low-rank adapters against candle's autograd in f64, and the same bits under every policy.

use crate::common::harness::{Outcome, Run, assert_agrees};
use crate::common::oracle::LORA_ALPHA;
use model::{
    AdapterTarget, Architecture, Attention, DrawingOrder, Labels, Lora, ModelConfig, ModulePattern,
    OffloadLabels, Parameters, Policy,
};
use std::collections::BTreeMap;

const LAYERS: usize = 2;

/// Factors of width 64 lie together in their arena, and those of width 20 do not.
const HIDDEN: [usize; 2] = [64, 20];

fn llama(hidden: usize) -> ModelConfig {
    let text = format!(
        r#"{{"hidden": {hidden}, "layers": {LAYERS}, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 48, "vocab": 31,
            "qk_norm": true, "qkv_bias": true}}"#
    );
    serde_json::from_str(&text).unwrap()
}

fn gpt2(hidden: usize) -> ModelConfig {
    let text = format!(
        r#"{{"hidden": {hidden}, "layers": {LAYERS}, "heads": 4, "kv_heads": 4, "head_dim": {}, "ffn": 33, "vocab": 31,
            "tie_embeddings": true, "norm": "layer", "activation": "gelu_tanh", "positions": "learned",
            "max_positions": 17, "biases": true}}"#,
        hidden / 4
    );
    serde_json::from_str(&text).unwrap()
}

/// Latent attention, with dense layers alone, so that stages can run on tiles.
fn latent(q: &str) -> ModelConfig {
    let text = format!(
        r#"{{"hidden": 20, "layers": {LAYERS}, "heads": 3, "kv_heads": 3, "head_dim": 10, "ffn": 44, "vocab": 31,
            "experts": {{"count": 2, "chosen": 1, "ffn": 4, "dense_layers": [0, 1]}},
            "latent": {{"kv": 7, "q": {q}, "rotary_dim": 4, "v_head_dim": 5, "neighbours": true}}}}"#
    );
    serde_json::from_str(&text).unwrap()
}

fn lora(targets: &[&str], dropout: f32) -> Lora {
    let pattern = |text| ModulePattern::ending(text).unwrap();
    Lora {
        rank: 4,
        alpha: LORA_ALPHA,
        dropout,
        targets: targets
            .iter()
            .map(|text| AdapterTarget::new(text).unwrap())
            .collect(),
        ranks: vec![(pattern("k_proj"), 6)],
        ..Lora::default()
    }
}

fn adapted(config: &ModelConfig, lora: Lora) -> Architecture {
    Architecture::declared(config, Attention::Flash, Parameters::adapted(lora))
}

fn keep_all() -> Policy {
    Policy::keep_all_of(Labels::DENSE.with_lora(), LAYERS)
}

#[test]
fn it_agrees_with_autograd() {
    for hidden in HIDDEN {
        for config in [llama(hidden), gpt2(hidden)] {
            for targets in [
                &["all-linear"][..],
                &["q_proj", "v_proj", "up_proj", "c_attn"],
                &[".*layers.1.*o_proj", "mlp.c_proj"],
            ] {
                let architecture = adapted(&config, lora(targets, 0.0));
                let mut run = Run::on_cpu(architecture, &keep_all());
                run.pass(1, true);
                assert_agrees(&run, &config, false);
            }
        }
    }
}

/// The model's loss, and those of later steps, are not those of another model: base weights keep their random streams.
#[test]
fn the_first_loss_is_the_base_models() {
    let config = llama(64);
    let fresh = model::Fresh {
        deviation: 0.3,
        seed: 5,
    };
    let loss = |parameters: Parameters, policy: &Policy| {
        let architecture = Architecture::declared(&config, Attention::Flash, parameters);
        let parameters = architecture.parameters.clone();
        let mut run = Run::on_cpu(architecture, policy);
        let layout = run.model.layout().clone();
        for (index, entry) in layout.entries().iter().enumerate() {
            let mut values = vec![0.0; entry.elements()];
            model::initialise::<()>(
                &parameters,
                &layout,
                fresh,
                DrawingOrder::Any,
                |first, chunk| {
                    if entry.range().contains(&first) {
                        let first = first - entry.offset;
                        values[first..first + chunk.len()].copy_from_slice(chunk);
                    }
                    Ok(())
                },
            )
            .unwrap();
            run.set(index, &values);
        }
        let mut losses = [1, 2].map(|step| {
            run.pass(step, true);
            let loss = run.loss().to_bits();
            run.descend();
            loss
        });
        losses.reverse();
        losses
    };
    let [second, first] = loss(Parameters::adapted(lora(&["all-linear"], 0.1)), &keep_all());
    let [base_second, base] = loss(Parameters::default(), &Policy::keep_all(LAYERS));
    assert_eq!(first, base);
    assert_ne!(second, base_second);
}

/// Trains on the processor as planned on shapes.
fn trained(architecture: impl Fn() -> Architecture, policy: &Policy, name: &str) -> Outcome {
    let planned = Run::on_shapes(architecture(), policy).train(2);
    let made = Run::on_cpu(architecture(), policy).train(3);
    assert_eq!(made.peak_bytes, planned.peak_bytes, "{name}");
    assert_eq!(made.replayed, planned.replayed, "{name}");
    made
}

#[test]
fn every_policy_gives_the_same_bits() {
    for (config, dropout) in [
        (llama(64), 0.0),
        (llama(20), 0.3),
        (gpt2(20), 0.3),
        (latent("null"), 0.0),
        (latent("11"), 0.3),
    ] {
        for tiles in [None, Some(5)] {
            let architecture = || adapted(&config, lora(&["all-linear"], dropout)).in_tiles(tiles);
            let labels = architecture().labels;
            let keep_all = || Policy::keep_all_of(labels, LAYERS);
            let keeps = trained(architecture, &keep_all(), "none");
            for spec in [
                "lora",
                "layernorm",
                match config.latent {
                    None => "qkv,lora",
                    Some(_) => "mla_up_proj,lora",
                },
                "mlp",
                "full",
                "full:uniform:2",
            ] {
                let policy = Policy::with_layers(labels, spec, &BTreeMap::new(), LAYERS).unwrap();
                let made = trained(architecture, &policy, spec);
                assert!(made.replayed.total() > 0, "{spec}");
                assert_eq!(made.losses, keeps.losses, "{spec}");
                assert_eq!(made.weights, keeps.weights, "{spec}");
            }
            let offloaded = OffloadLabels::parse_of(labels, "lora").unwrap();
            let policy = keep_all().offload(&offloaded).unwrap();
            if tiles.is_none() {
                let made = trained(architecture, &policy, "offload");
                assert!(made.traffic.d2h_bytes > keeps.traffic.d2h_bytes);
                assert_eq!(made.weights, keeps.weights);
            }
        }
    }
}

/// An input that no factor's gradient reads is not kept, and nothing is below the lowest layer with an adapter.
#[test]
fn what_no_factor_needs_is_not_kept() {
    let peak = |lora: Lora| {
        let run = Run::on_shapes(adapted(&llama(64), lora), &keep_all());
        run.train(1).peak_bytes
    };
    let all = peak(lora(&["all-linear"], 0.0));
    let up = peak(lora(&["up_proj"], 0.0));
    let of_last = peak(Lora {
        layers: Some(vec![1]),
        ..lora(&["all-linear"], 0.0)
    });
    assert!(up < all && of_last < all, "{up} {of_last} {all}");
}
