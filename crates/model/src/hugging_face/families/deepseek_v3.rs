//! DeepSeek-V3: latent attention, and experts by sigmoids, with biases where they are chosen.

use super::decoder::Assumed;
use super::latent::{AssumedExperts, AssumedWidths, PREDICTORS};
use super::{Description, SavedAs, experts, latent, windows};
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::{ExpertsConfig, ModelConfig, ScoreKind};
use serde_json::{Value, json};

pub(super) const FAMILY: Description = Description {
    aliases: &[("num_local_experts", "n_routed_experts")],
    ..Description::new(["deepseek_v3", "DeepseekV3ForCausalLM"], read, write)
};

const ASSUMED: AssumedExperts = AssumedExperts {
    count: 256,
    chosen: 8,
    ffn: 2048,
    shared: 1,
    factor: 2.5,
};

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    let config = read_attention(keys, &Assumed::LLAMA, &AssumedWidths::DEEPSEEK)?;
    let first = keys.size_or("first_k_dense_replace", 3)?;
    let dense_layers = windows::first_layers(first, config.layers);
    let experts = experts_by_sigmoid(keys, &ASSUMED, dense_layers, [8, 4])?;
    Ok(ModelConfig {
        experts: Some(experts),
        ..config
    })
}

/// Reads a model without its experts. transformers turns `head_dim` columns of queries, and ignores `qk_rope_head_dim`, so
/// they must be equal.
pub(super) fn read_attention(
    keys: &Keys,
    assumed: &Assumed,
    widths: &AssumedWidths,
) -> Result<ModelConfig, HfConfigError> {
    let turned = keys.size_or("qk_rope_head_dim", widths.rotary)?;
    let other = keys.size_or("head_dim", turned)?;
    if other != turned {
        let both = format!("{other}, where qk_rope_head_dim is {turned},");
        return Err(HfConfigError::Unsupported("head_dim", both));
    }
    const NEIGHBOURS: &str = "rope_interleave";
    let neighbours = keys.is_missing(NEIGHBOURS) || *keys.get(NEIGHBOURS) == true;
    latent::read(keys, (assumed, widths), neighbours)
}

/// Experts by sigmoids; `groups` are those that the class assumes, and how many of them are chosen.
pub(super) fn experts_by_sigmoid(
    keys: &Keys,
    assumed: &AssumedExperts,
    dense_layers: Vec<usize>,
    groups: [usize; 2],
) -> Result<ExpertsConfig, HfConfigError> {
    keys.refuse_other("scoring_func", &["sigmoid"])?;
    keys.refuse_other("topk_method", &["noaux_tc"])?;
    Ok(ExpertsConfig {
        score: ScoreKind::Sigmoid,
        normed: keys.flag_or("norm_topk_prob", true)?,
        groups: keys.size_or("n_group", groups[0])?,
        chosen_groups: keys.size_or("topk_group", groups[1])?,
        choice_bias: true,
        ..latent::experts(keys, assumed, dense_layers)?
    })
}

/// Writes such experts.
pub(super) fn write_experts_by_sigmoid(experts: &ExpertsConfig, json: &mut Value) {
    latent::write_experts(experts, json);
    json["n_group"] = json!(experts.groups);
    json["topk_group"] = json!(experts.chosen_groups);
    json["topk_method"] = json!("noaux_tc");
    json["scoring_func"] = json!("sigmoid");
    json[PREDICTORS[0]] = json!(0);
}

pub(super) fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let mut json = latent::write(config, saved);
    write_experts_by_sigmoid(&experts::of(config), &mut json);
    let neighbours = config.latent.as_ref().map(|latent| latent.neighbours);
    json["rope_interleave"] = json!(neighbours);
    json
}
