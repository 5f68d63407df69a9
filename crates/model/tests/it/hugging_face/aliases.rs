//! Names under which files have the computation of a family.

use crate::hugging_face::folders::golden;
use memory::DType;
use model::{HfConfigError, ModelConfig, Origin};
use serde_json::{Value, json};

/// A golden folder's `config.json` with other keys; those that are null are left out.
fn with(family: &str, keys: &Value) -> Value {
    let text = std::fs::read_to_string(golden(family).join("config.json")).unwrap();
    let mut json: Value = serde_json::from_str(&text).unwrap();
    let config = json.as_object_mut().unwrap();
    for (key, value) in keys.as_object().unwrap() {
        config.insert(key.clone(), value.clone());
        if value.is_null() {
            config.remove(key);
        }
    }
    json
}

fn read(json: &Value) -> Result<ModelConfig, HfConfigError> {
    ModelConfig::from_hf(&json.to_string())
}

/// Keys of a file under its own name, and those that make its family's class compute the same.
fn aliases() -> [(&'static str, Value, &'static str, Value); 4] {
    let rope = json!({"rope_type": "default", "rope_theta": 500.0});
    let whole = json!({"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0});
    let seed = json!({"attention_bias": true, "attention_dropout": 0.0, "residual_dropout": 0.0, "num_key_value_heads": null,
        "num_attention_heads": 8, "head_dim": null, "use_sliding_window": null, "sliding_window": null,
        "max_window_layers": null, "layer_types": null, "architectures": ["SeedOssForCausalLM"]});
    let qwen2 = json!({"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "use_sliding_window": false});
    let dots1 = json!({"attention_bias": false, "use_qk_norm": null, "num_key_value_heads": null, "num_attention_heads": 32,
        "first_k_dense_replace": null, "norm_topk_prob": null, "rms_norm_eps": null, "scoring_func": "noaux_tc",
        "rope_parameters": rope, "architectures": ["Dots1ForCausalLM"]});
    let of_dots1 = json!({"attention_bias": false, "use_qk_norm": true, "num_key_value_heads": 32, "num_attention_heads": 32,
        "first_k_dense_replace": 0, "norm_topk_prob": false, "rms_norm_eps": 1e-6, "rope_parameters": whole});
    let solar = json!({"use_qk_norm": null, "head_dim": null, "moe_intermediate_size": null, "rope_parameters": null,
        "intermediate_size": null, "first_k_dense_replace": null, "architectures": ["SolarOpenForCausalLM"]});
    let of_solar = json!({"use_qk_norm": false, "head_dim": 128, "moe_intermediate_size": 1280, "intermediate_size": 1,
        "first_k_dense_replace": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}});
    // Betas of YaRN that are equal are published so.
    let kimi = json!({"rope_parameters": null, "rope_theta": 5e4, "rope_scaling": {"type": "yarn", "factor": 32.0, "beta_fast": 1.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}});
    [
        ("seed_oss", seed, "qwen2", qwen2),
        ("dots1", dots1, "glm4_moe", of_dots1),
        ("solar_open", solar, "glm4_moe", of_solar),
        ("kimi_k2", kimi.clone(), "deepseek_v3_yarn", kimi),
    ]
}

#[test]
fn an_alias_is_read_as_its_family_and_keeps_its_name() {
    for (alias, keys, family, of_family) in aliases() {
        let as_family = read(&with(family, &of_family)).unwrap();
        let mut json = with(family, &keys);
        if keys != of_family {
            json["architectures"].take();
            let mistaken = read(&json).ok();
            assert_ne!(mistaken.as_ref(), Some(&as_family), "{alias}");
        }
        json["architectures"] = with(family, &keys)["architectures"].take();
        json["model_type"] = alias.into();
        assert_eq!(read(&json).unwrap(), as_family, "{alias}");

        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), json.to_string()).unwrap();
        let origin = Origin::read(folder.path()).unwrap();
        let files = origin.files(&as_family, 19, DType::F32);
        let saved: Value = serde_json::from_slice(&files.last().unwrap().1).unwrap();
        assert_eq!(saved, json, "{alias}");
    }
}

#[test]
fn what_a_family_does_not_have_is_refused_by_its_key() {
    for (alias, key, value) in [
        ("seed_oss", "attention_bias", json!(false)),
        ("seed_oss", "attention_out_bias", json!(true)),
        ("seed_oss", "mlp_bias", json!(true)),
        ("seed_oss", "residual_dropout", json!(null)),
        ("seed_oss", "attention_dropout", json!(null)),
        ("seed_oss", "architectures", json!(["Qwen2ForCausalLM"])),
        ("dots1", "attention_bias", json!(true)),
        ("dots1", "max_window_layers", json!(1)),
        ("dots1", "partial_rotary_factor", json!(0.5)),
        ("dots1", "n_routed_experts", json!(null)),
        ("dots1", "scoring_func", json!("softmax")),
        ("solar_open", "use_qk_norm", json!(true)),
        ("kimi_k2", "moe_layer_freq", json!(2)),
    ] {
        let (_, mut keys, family, _) = aliases().into_iter().find(|row| row.0 == alias).unwrap();
        keys["model_type"] = alias.into();
        assert!(read(&with(family, &keys)).is_ok(), "{alias}");
        keys[key] = value;
        let refused = read(&with(family, &keys)).unwrap_err().to_string();
        assert!(refused.contains(key), "{alias}: {refused}");
    }
}
