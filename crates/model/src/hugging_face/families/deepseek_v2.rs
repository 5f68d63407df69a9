//! DeepSeek-V2: latent attention, and experts by a softmax beside shared ones.

use super::decoder::Assumed;
use super::latent::{AssumedExperts, AssumedWidths};
use super::{Description, SavedAs, experts, latent, windows};
use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::{ExpertsConfig, ModelConfig};
use serde_json::{Value, json};

pub(super) const FAMILY: Description = Description {
    aliases: &[("num_experts", "n_routed_experts")],
    ..Description::new(["deepseek_v2", "DeepseekV2ForCausalLM"], read, write)
};

const ASSUMED: AssumedExperts = AssumedExperts {
    count: 64,
    chosen: 6,
    ffn: 1407,
    shared: 2,
    factor: 1.0,
};

const IN_GROUPS: &str = "group_limited_greedy";

fn read(keys: &Keys) -> Result<ModelConfig, HfConfigError> {
    keys.refuse_other("scoring_func", &["softmax"])?;
    keys.refuse_other("topk_method", &["greedy", IN_GROUPS])?;
    // Its class turns neighbours whatever the file says.
    let config = latent::read(keys, (&Assumed::LLAMA, &AssumedWidths::DEEPSEEK), true)?;
    let first = keys.size_or("first_k_dense_replace", 0)?;
    let dense_layers = windows::first_layers(first, config.layers);
    let in_groups = *keys.get("topk_method") == IN_GROUPS;
    let groups = |key| match in_groups {
        true => keys.size_or(key, 1),
        false => Ok(1),
    };
    Ok(ModelConfig {
        experts: Some(ExpertsConfig {
            // Its class ignores norm_topk_prob.
            normed: false,
            groups: groups("n_group")?,
            chosen_groups: groups("topk_group")?,
            ..latent::experts(keys, &ASSUMED, dense_layers)?
        }),
        ..config
    })
}

fn write(config: &ModelConfig, saved: &SavedAs) -> Value {
    let experts = experts::of(config);
    let in_groups = experts.groups > 1;
    let mut json = latent::write(config, saved);
    latent::write_experts(&experts, &mut json);
    json["n_group"] = json!(in_groups.then_some(experts.groups));
    json["topk_group"] = json!(in_groups.then_some(experts.chosen_groups));
    json["topk_method"] = json!(if in_groups { IN_GROUPS } else { "greedy" });
    json["scoring_func"] = json!("softmax");
    json
}
