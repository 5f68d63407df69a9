//! The keys of experts that several families share.

use crate::hugging_face::keys::{HfConfigError, Keys};
use crate::{ExpertsConfig, ModelConfig, RouterAuxKind};
use serde_json::{Value, json};

/// The coefficient of the loss of balance. transformers adds the loss only where it gives the router's logits too.
pub(super) fn aux(keys: &Keys) -> Result<f64, HfConfigError> {
    match keys.flag_or("output_router_logits", false)? {
        true => keys.number_or("router_aux_loss_coef", 0.001),
        false => Ok(0.0),
    }
}

/// Writes that coefficient.
pub(super) fn write_aux(config: &ModelConfig, json: &mut Value) {
    // transformers knows no other kind.
    let is_pooled = config.router_aux_kind == RouterAuxKind::Pooled;
    let aux = if is_pooled { config.router_aux } else { 0.0 };
    json["output_router_logits"] = json!(aux > 0.0);
    json["router_aux_loss_coef"] = json!(aux);
}

/// Experts of Qwen; those of a file that does not say are `assumed`.
pub(super) fn qwen(
    keys: &Keys,
    assumed: [usize; 3],
    layers: usize,
) -> Result<ExpertsConfig, HfConfigError> {
    let [count, chosen, ffn] = assumed;
    let sizes = [
        keys.size_or("num_experts", count)?,
        keys.size_or("num_experts_per_tok", chosen)?,
        keys.size_or("moe_intermediate_size", ffn)?,
    ];
    Ok(ExpertsConfig {
        dense_layers: qwen_dense_layers(keys, layers)?,
        normed: keys.flag_or("norm_topk_prob", false)?,
        ..ExpertsConfig::plain(sizes)
    })
}

/// Layers of Qwen without experts: those that are listed, and all but every `decoder_sparse_step`th.
fn qwen_dense_layers(keys: &Keys, layers: usize) -> Result<Vec<usize>, HfConfigError> {
    const STEP: &str = "decoder_sparse_step";
    let step = keys.size_or(STEP, 1)?;
    if step == 0 {
        return Err(HfConfigError::Key(STEP, "a whole number above 0"));
    }
    let listed = keys.layers("mlp_only_layers", layers)?;
    let is_dense = |layer: &usize| listed.contains(layer) || !(layer + 1).is_multiple_of(step);
    Ok((0..layers).filter(is_dense).collect())
}

/// The experts of a model of a family that has them.
pub(super) fn of(config: &ModelConfig) -> ExpertsConfig {
    let of_none = || ExpertsConfig::plain([1, 1, 1]);
    config.experts.clone().unwrap_or_else(of_none)
}

/// Writes experts of Qwen.
pub(super) fn write_qwen(config: &ModelConfig, experts: &ExpertsConfig, json: &mut Value) {
    json["num_experts_per_tok"] = json!(experts.chosen);
    json["num_experts"] = json!(experts.count);
    json["moe_intermediate_size"] = json!(experts.ffn);
    json["norm_topk_prob"] = json!(experts.normed);
    json["decoder_sparse_step"] = json!(1);
    json["mlp_only_layers"] = json!(experts.dense_layers);
    json["use_sliding_window"] = json!(false);
    write_aux(config, json);
}
