//! What is saved, read by a second implementation in Rust: candle-transformers' Llama and Qwen2 give our probabilities.

use candle_core::{D, DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_nn::ops::log_softmax;
use candle_transformers::models::{llama, qwen2};
use serde_json::Value;
use std::path::Path;
use trainer::{Trainer, configuration};

const SEQ: usize = 9;
const VOCAB: usize = 17;

/// Log-probabilities of all tokens after each prefix of [`tokens`], flat.
type LogProbabilities = Vec<f64>;

/// A model of `family` in a folder, its norms and biases trained away from ones and zeros.
fn trained(family: &[&str], folder: &Path) {
    let small = [
        "model.hidden=24",
        "model.layers=2",
        "model.heads=4",
        "model.kv_heads=2",
        "model.head_dim=6",
        "model.ffn=40",
        "model.vocab=17",
        "model.init_std=0.2",
        "train.dtype=f32",
        "train.device=cpu",
        "data.seq=9",
        "batch.micro=1",
        "lr.peak=0.05",
    ];
    let config = configuration("tiny", &[&small[..], family].concat()).unwrap();
    let mut trainer = Trainer::new(config).unwrap();
    trainer.save(folder.join("fresh")).unwrap();
    let ids = tokens();
    let targets = Tensor::new(&[[2i64, 7, 1, 8, -100, 2, 8, 1, 16]], &Device::Cpu).unwrap();
    for _ in 0..3 {
        trainer.step(&ids, &targets).unwrap();
    }
    trainer.save(folder.join("trained")).unwrap();
}

fn tokens() -> Tensor {
    Tensor::new(&[[3u32, 1, 4, 1, 5, 9, 2, 6, 16]], &Device::Cpu).unwrap()
}

/// The loss of a single target, for every one that there could be.
fn ours(folder: &Path) -> LogProbabilities {
    let set = ["data.seq=9", "batch.micro=1", "train.device=cpu"];
    let mut trainer = Trainer::from_pretrained(folder, &set).unwrap();
    let cases = (0..SEQ).flat_map(|place| (0..VOCAB).map(move |token| (place, token)));
    let log_probability = |(place, token)| {
        let mut targets = [-100i64; SEQ];
        targets[place] = token as i64;
        let targets = Tensor::new(&[targets], &Device::Cpu).unwrap();
        -trainer.loss(&tokens(), &targets).unwrap()
    };
    cases.map(log_probability).collect()
}

/// candle-transformers returns the logits after the last token alone, so that every prefix is a pass of its own.
fn theirs(folder: &Path) -> LogProbabilities {
    let text = std::fs::read(folder.join("config.json")).unwrap();
    let config: Value = serde_json::from_slice(&text).unwrap();
    let weights = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu);
    let weights = VarBuilder::from_tensors(weights.unwrap(), DType::F32, &Device::Cpu);
    let mut logits: Box<dyn FnMut(&Tensor) -> Tensor> = match config["model_type"].as_str() {
        Some("llama") => of_llama(config, weights),
        _ => of_qwen2(config, weights),
    };
    let of_prefix = |length| {
        let logits = logits(&tokens().narrow(1, 0, length).unwrap());
        let logits = logits.to_dtype(DType::F64).unwrap();
        let log_probabilities = log_softmax(&logits, D::Minus1).unwrap();
        log_probabilities.flatten_all().unwrap().to_vec1().unwrap()
    };
    (1..=SEQ).map(of_prefix).collect::<Vec<Vec<f64>>>().concat()
}

fn of_llama(config: Value, weights: VarBuilder<'static>) -> Box<dyn FnMut(&Tensor) -> Tensor> {
    let config: llama::LlamaConfig = serde_json::from_value(config).unwrap();
    let config = config.into_config(false);
    let model = llama::Llama::load(weights, &config).unwrap();
    let cache = llama::Cache::new(false, DType::F32, &config, &Device::Cpu).unwrap();
    Box::new(move |ids| model.forward(ids, 0, &mut cache.clone()).unwrap())
}

fn of_qwen2(config: Value, weights: VarBuilder<'static>) -> Box<dyn FnMut(&Tensor) -> Tensor> {
    let config: qwen2::Config = serde_json::from_value(config).unwrap();
    let mut model = qwen2::ModelForCausalLM::new(&config, weights).unwrap();
    Box::new(move |ids| {
        model.clear_kv_cache();
        model.forward(ids, 0).unwrap()
    })
}

/// The largest relative difference.
fn distance(ours: &[f64], theirs: &[f64]) -> f64 {
    assert_eq!((ours.len(), theirs.len()), (SEQ * VOCAB, SEQ * VOCAB));
    let differences = ours.iter().zip(theirs);
    let relative = differences.map(|(ours, theirs)| ((ours - theirs) / theirs).abs());
    relative.fold(0.0, f64::max)
}

#[test]
fn llama_and_qwen2_of_candle_transformers_read_what_is_saved() {
    let families: [(&str, &[&str]); 4] = [
        ("llama", &["model.tie_embeddings=false"]),
        (
            "llama, tied, with scaled positions",
            &[
                "model.tie_embeddings=true",
                "model.rope_scaling={factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0, original_max_position = 4}",
            ],
        ),
        (
            "qwen2",
            &["model.qkv_bias=true", "model.tie_embeddings=false"],
        ),
        (
            "qwen2, tied",
            &["model.qkv_bias=true", "model.tie_embeddings=true"],
        ),
    ];
    for (name, family) in families {
        let folder = tempfile::tempdir().unwrap();
        trained(family, folder.path());
        let [fresh, trained] = ["fresh", "trained"].map(|name| folder.path().join(name));
        let ours = ours(&trained);
        let (same, other) = (
            distance(&ours, &theirs(&trained)),
            distance(&ours, &theirs(&fresh)),
        );
        println!("{name}: {same:e}, and of the model before it was trained {other:e}");
        assert!(same < 1e-5, "{name}: {same:e}");
        assert!(other > 1e-2, "{name}: {other:e}");
    }
}
