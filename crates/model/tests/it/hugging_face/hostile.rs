//! Whatever a `config.json` says, it becomes a model or a refusal.

use crate::hugging_face::folders::{FAMILIES, golden};
use memory::DType;
use model::{Architecture, Attention, ModelConfig};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// Numbers at the edges, and values of every other type.
fn hostile() -> impl Strategy<Value = Value> {
    let edges = prop::sample::select(vec![
        json!(0),
        json!(1),
        json!(-1),
        json!(u64::MAX),
        json!(u64::MAX / 2 + 1),
        json!(1_u64 << 32),
        json!(1e308),
        json!(-1e308),
        json!(0.5),
        json!(1e-320),
        json!(null),
        json!(true),
        json!(""),
        json!("llama3"),
        json!([]),
        json!([[1], {"a": null}]),
        json!({}),
        json!({"rope_type": "llama3", "factor": 1e300, "low_freq_factor": 1, "high_freq_factor": 4,
            "original_max_position_embeddings": 1e300, "rope_theta": "x"}),
    ]);
    // Of decimals with more digits serde_json reads a neighbour now and then, which would be written differently.
    let short = (any::<i32>(), -20..20).prop_map(|(digits, power)| {
        let number: f64 = format!("{digits}e{power}").parse().expect("it is a number");
        json!(number)
    });
    prop_oneof![3 => edges, 1 => any::<u32>().prop_map(Value::from), 1 => short]
}

fn golden_config(family: &str) -> Map<String, Value> {
    let text = std::fs::read(golden(family).join("config.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

proptest! {
    #[test]
    fn values_of_any_kind(
        family in prop::sample::select(FAMILIES.to_vec()),
        changes in prop::collection::vec((any::<prop::sample::Index>(), hostile()), 1..4),
    ) {
        let mut config = golden_config(family);
        for (index, value) in changes {
            let key = index.index(config.len());
            *config.values_mut().nth(key).unwrap() = value;
        }
        let text = serde_json::to_string(&config).unwrap();
        if let Ok(model) = ModelConfig::from_hf(&text) {
            // Sizes that passed can be counted with, and what is written is read again.
            let real = model.hidden as f64 * (model.vocab as f64 + model.layers as f64 * model.q_width() as f64);
            prop_assert!(real <= 2f64.powi(48), "{model:?}");
            let written = model.to_hf(8, DType::F32);
            prop_assert_eq!(ModelConfig::from_hf(&written).unwrap(), model);
        }
    }

    #[test]
    fn texts_of_any_kind(text in ".{0,64}", cut in any::<prop::sample::Index>()) {
        let _ = ModelConfig::from_hf(&text);
        let whole = serde_json::to_string(&golden_config("llama3")).unwrap();
        prop_assert!(ModelConfig::from_hf(&whole[..cut.index(whole.len())]).is_err());
    }
}

/// The largest models that pass are listed in no time.
#[test]
fn what_passes_can_be_laid_out() {
    let mut config = golden_config("llama");
    config["num_hidden_layers"] = json!(1 << 16);
    config["vocab_size"] = json!(1_u64 << 42);
    let model = ModelConfig::from_hf(&Value::Object(config.clone()).to_string()).unwrap();
    let architecture = Architecture::of(&model, Attention::Eager);
    assert!(architecture.parameters.layout(|_, _| false).elements() > 1 << 47);
    config["vocab_size"] = json!(1_u64 << 43);
    config["num_hidden_layers"] = json!(1);
    let larger = ModelConfig::from_hf(&Value::Object(config).to_string()).unwrap_err();
    assert!(larger.to_string().contains("more than 2^48"), "{larger}");
}
