//! The keys of experts and of latent attention in a `config.json`: Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and V3, as
//! transformers reads them.

use super::keys::{HfConfigError, flag, number, size, size_or};
use crate::{ExpertsConfig, LatentConfig, ModelConfig, RouterAuxKind, ScoreKind};
use serde_json::{Value, json};

/// Names of the key for extra prediction layers. We skip these layers and write 0, since transformers assumes one. Newer files
/// have the second name.
pub(super) const PREDICTORS: [&str; 2] = ["num_nextn_predict_layers", "num_mtp_layers"];

/// The families whose feed-forward layers are experts.
const FAMILIES: [&str; 5] = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
];

/// Whether a family's feed-forward layers are experts.
pub(super) fn are_in(family: &str) -> bool {
    FAMILIES.contains(&family)
}

fn is_deepseek(family: &str) -> bool {
    family.starts_with("deepseek")
}

/// The same configuration with experts and latents.
pub(super) fn read(
    json: &Value,
    family: &str,
    config: ModelConfig,
) -> Result<ModelConfig, HfConfigError> {
    if !are_in(family) {
        return Ok(config);
    }
    refuse(json, family)?;
    let config = ModelConfig {
        experts: Some(experts(json, family, &config)?),
        router_aux: aux(json, family)?,
        ..config
    };
    if !is_deepseek(family) {
        return Ok(config);
    }
    let latent = latent(json, family)?;
    Ok(ModelConfig {
        head_dim: size_or(json, "qk_nope_head_dim", 128)?.saturating_add(latent.rotary_dim),
        kv_heads: size_or(json, "num_key_value_heads", config.heads)?,
        latent: Some(latent),
        ..config
    })
}

/// Features that would change the arithmetic.
fn refuse(json: &Value, family: &str) -> Result<(), HfConfigError> {
    let text = |key: &str| json[key].as_str();
    let is_v3 = family == "deepseek_v3";
    let scoring = if is_v3 { "sigmoid" } else { "softmax" };
    let methods: &[&str] = match is_v3 {
        true => &["noaux_tc"],
        false => &["greedy", "group_limited_greedy"],
    };
    let window = match family {
        "mixtral" => ("sliding_window", !json["sliding_window"].is_null()),
        _ => ("use_sliding_window", json["use_sliding_window"] == true),
    };
    let is_other = |key: &str, known: &[&str]| text(key).is_some_and(|one| !known.contains(&one));
    let refused = [
        (
            "router_jitter_noise",
            number(json, "router_jitter_noise")?.is_some_and(|it| it != 0.0),
        ),
        window,
        (
            "scoring_func",
            is_deepseek(family) && is_other("scoring_func", &[scoring]),
        ),
        (
            "topk_method",
            is_deepseek(family) && is_other("topk_method", methods),
        ),
        (
            "moe_layer_freq",
            number(json, "moe_layer_freq")?.is_some_and(|it| it != 1.0),
        ),
    ];
    match refused.into_iter().find(|(_, is_there)| *is_there) {
        Some((key, _)) => Err(HfConfigError::Unsupported(key, json[key].to_string())),
        None => Ok(()),
    }
}

fn experts(
    json: &Value,
    family: &str,
    config: &ModelConfig,
) -> Result<ExpertsConfig, HfConfigError> {
    let count = |default| {
        let key = match family {
            "mixtral" => "num_local_experts",
            "qwen2_moe" | "qwen3_moe" => "num_experts",
            _ => "n_routed_experts",
        };
        size_or(json, key, default)
    };
    let flag_or = |key, default| match json[key].is_null() {
        true => Ok(default),
        false => flag(json, key),
    };
    let experts = ExpertsConfig {
        count: count(8)?,
        chosen: size_or(json, "num_experts_per_tok", 2)?,
        ffn: config.ffn,
        shared_ffn: 0,
        shared_gate: false,
        dense_layers: Vec::new(),
        score: ScoreKind::Softmax,
        normed: true,
        factor: 1.0,
        groups: 1,
        chosen_groups: 1,
        choice_bias: false,
    };
    match family {
        "mixtral" => Ok(experts),
        "qwen2_moe" | "qwen3_moe" => {
            let is_second = family == "qwen2_moe";
            let [all, chosen, ffn] = if is_second {
                [60, 4, 1408]
            } else {
                [128, 8, 768]
            };
            Ok(ExpertsConfig {
                count: count(all)?,
                chosen: size_or(json, "num_experts_per_tok", chosen)?,
                ffn: size_or(json, "moe_intermediate_size", ffn)?,
                shared_ffn: match is_second {
                    true => size_or(json, "shared_expert_intermediate_size", 5632)?,
                    false => 0,
                },
                shared_gate: is_second,
                dense_layers: qwen_dense_layers(json, config.layers)?,
                normed: flag(json, "norm_topk_prob")?,
                ..experts
            })
        }
        _ => {
            let is_v3 = family == "deepseek_v3";
            let [all, chosen, dense, shared] = if is_v3 { [256, 8, 3, 1] } else { [64, 6, 0, 2] };
            let ffn = size_or(
                json,
                "moe_intermediate_size",
                if is_v3 { 2048 } else { 1407 },
            )?;
            let first_dense = size_or(json, "first_k_dense_replace", dense)?;
            let in_groups = is_v3 || json["topk_method"] == "group_limited_greedy";
            let groups = |key, default| match in_groups {
                true => size_or(json, key, default),
                false => Ok(1),
            };
            Ok(ExpertsConfig {
                count: count(all)?,
                chosen: size_or(json, "num_experts_per_tok", chosen)?,
                ffn,
                shared_ffn: ffn.saturating_mul(size_or(json, "n_shared_experts", shared)?),
                // The list is bounded, since `validate` refuses models of more layers.
                dense_layers: (0..first_dense.min(config.layers).min(1 << 16)).collect(),
                score: if is_v3 {
                    ScoreKind::Sigmoid
                } else {
                    ScoreKind::Softmax
                },
                // transformers does not look at the key in V2.
                normed: is_v3 && flag_or("norm_topk_prob", true)?,
                factor: number(json, "routed_scaling_factor")?.unwrap_or(if is_v3 {
                    2.5
                } else {
                    1.0
                }),
                groups: groups("n_group", if is_v3 { 8 } else { 1 })?,
                chosen_groups: groups("topk_group", if is_v3 { 4 } else { 1 })?,
                choice_bias: is_v3,
                ..experts
            })
        }
    }
}

/// Layers of Qwen without experts: those that are listed, and all but every `decoder_sparse_step`th.
fn qwen_dense_layers(json: &Value, layers: usize) -> Result<Vec<usize>, HfConfigError> {
    let step = size_or(json, "decoder_sparse_step", 1)?;
    if step == 0 {
        return Err(HfConfigError::Key(
            "decoder_sparse_step",
            "a whole number above 0",
        ));
    }
    let layer = |value: &Value| value.as_u64().filter(|layer| *layer < layers as u64);
    let listed: Option<Vec<u64>> = match &json["mlp_only_layers"] {
        Value::Null => Some(Vec::new()),
        Value::Array(list) => list.iter().map(layer).collect(),
        _ => None,
    };
    let listed = listed.ok_or(HfConfigError::Key(
        "mlp_only_layers",
        "a list of layers, each a whole number below `num_hidden_layers`",
    ))?;
    let is_dense =
        |layer: &usize| listed.contains(&(*layer as u64)) || !(layer + 1).is_multiple_of(step);
    Ok((0..layers.min(1 << 16)).filter(is_dense).collect())
}

/// The coefficient of the loss of balance. transformers adds the loss only where it gives the router's logits too.
fn aux(json: &Value, family: &str) -> Result<f64, HfConfigError> {
    if is_deepseek(family) || !flag(json, "output_router_logits")? {
        return Ok(0.0);
    }
    Ok(number(json, "router_aux_loss_coef")?.unwrap_or(0.001))
}

fn latent(json: &Value, family: &str) -> Result<LatentConfig, HfConfigError> {
    let is_v3 = family == "deepseek_v3";
    let rotary_dim = size_or(json, "qk_rope_head_dim", 64)?;
    // transformers ignores the key in V2, and turns so many dimensions in V3.
    if is_v3 && size_or(json, "head_dim", rotary_dim)? != rotary_dim {
        let both = format!(
            "{}, where qk_rope_head_dim is {rotary_dim},",
            json["head_dim"]
        );
        return Err(HfConfigError::Unsupported("head_dim", both));
    }
    Ok(LatentConfig {
        kv: size_or(json, "kv_lora_rank", 512)?,
        q: match json.get("q_lora_rank") {
            None => Some(1536),
            Some(Value::Null) => None,
            Some(_) => Some(size(json, "q_lora_rank")?),
        },
        rotary_dim,
        v_head_dim: size_or(json, "v_head_dim", 128)?,
        neighbours: match json.get("rope_interleave") {
            Some(value) if is_v3 => *value == true,
            _ => true,
        },
    })
}

/// Adds the keys of experts and latents.
pub(super) fn write(config: &ModelConfig, family: &str, json: &mut Value) {
    let Some(experts) = &config.experts else {
        return;
    };
    json["num_experts_per_tok"] = json!(experts.chosen);
    match family {
        "mixtral" => {
            json["num_local_experts"] = json!(experts.count);
            json["intermediate_size"] = json!(experts.ffn);
            json["sliding_window"] = Value::Null;
        }
        "qwen2_moe" | "qwen3_moe" => {
            json["num_experts"] = json!(experts.count);
            json["moe_intermediate_size"] = json!(experts.ffn);
            json["norm_topk_prob"] = json!(experts.normed);
            json["decoder_sparse_step"] = json!(1);
            json["mlp_only_layers"] = json!(experts.dense_layers);
            json["use_sliding_window"] = json!(false);
            if family == "qwen2_moe" {
                json["shared_expert_intermediate_size"] = json!(experts.shared_ffn);
                json["qkv_bias"] = json!(config.qkv_bias);
            }
        }
        _ => write_deepseek(config, experts, family, json),
    }
    if !is_deepseek(family) {
        // transformers knows no other kind.
        let is_pooled = config.router_aux_kind == RouterAuxKind::Pooled;
        let aux = if is_pooled { config.router_aux } else { 0.0 };
        json["output_router_logits"] = json!(aux > 0.0);
        json["router_aux_loss_coef"] = json!(aux);
    }
}

fn write_deepseek(config: &ModelConfig, experts: &ExpertsConfig, family: &str, json: &mut Value) {
    let latent = config.latent.as_ref().expect("the family has latents");
    let is_v3 = family == "deepseek_v3";
    let in_groups = is_v3 || experts.groups > 1;
    let keys = json!({
        "n_routed_experts": experts.count,
        "moe_intermediate_size": experts.ffn,
        "n_shared_experts": experts.shared_ffn / experts.ffn,
        "first_k_dense_replace": experts.dense_layers.len(),
        "moe_layer_freq": 1,
        "norm_topk_prob": experts.normed,
        "routed_scaling_factor": experts.factor,
        "n_group": in_groups.then_some(experts.groups),
        "topk_group": in_groups.then_some(experts.chosen_groups),
        "topk_method": match (is_v3, in_groups) {
            (true, _) => "noaux_tc",
            (false, true) => "group_limited_greedy",
            (false, false) => "greedy",
        },
        "scoring_func": if is_v3 { "sigmoid" } else { "softmax" },
        "kv_lora_rank": latent.kv,
        "q_lora_rank": latent.q,
        "qk_rope_head_dim": latent.rotary_dim,
        "qk_nope_head_dim": config.head_dim - latent.rotary_dim,
        "v_head_dim": latent.v_head_dim,
        "head_dim": latent.rotary_dim,
    });
    let object = keys.as_object().expect("it was made as an object");
    for (key, value) in object {
        json[key] = value.clone();
    }
    if is_v3 {
        json["rope_interleave"] = json!(latent.neighbours);
        json[PREDICTORS[0]] = json!(0);
    }
}
