//! The model that `--init-from` names.

use crate::failure::Failure;
use model::{ModelConfig, Quantisation};
use settings::{Resolved, check};
use std::path::Path;

/// Keys of `[model]` that no weight's shape depends on: a run may change them for a model that it starts from.
const FREE_OF_SHAPES: [&str; 10] = [
    "dropout",
    "norm_eps",
    "rope_theta",
    "rope_scaling",
    "sliding_window",
    "full_attention_layers",
    "init_std",
    "router_aux",
    "router_aux_kind",
    "router_z_loss",
];

/// As [`adopt_model`], for a model that is trained: one that is stored as codes needs adapters.
pub(crate) fn adopt_model_to_train(resolved: &mut Resolved, folder: &Path) -> Result<(), Failure> {
    let stored = adopt_model(resolved, folder)?;
    match stored.filter(|_| resolved.config.lora.rank.is_none()) {
        None => Ok(()),
        Some(Quantisation { codes, .. }) => Err(Failure::Usage(format!(
            "the weights in {} are {}, which is not trained itself; add --lora RANK to train adapters on it, or give the folder with \
             the model in bf16 or f32 (`trainer export {0} --out DIR` writes the values of its codes)",
            folder.display(),
            codes.as_str(),
        ))),
    }
}

/// What to know of sequences that are longer than those that the model was made for, where its folder says so. One with learned
/// positions has no others.
pub(crate) fn beyond_context(resolved: &Resolved, seq: usize) -> Option<String> {
    let longest = resolved.context_length.filter(|longest| seq > *longest)?;
    Some(format!(
        "sequences have {seq} tokens, and the model was made for up to {longest} (max_position_embeddings of its config.json): it has \
         not learnt the positions beyond; take --seq {longest}, or stretch them by model.rope_scaling"
    ))
}

/// `--init-from` sets the model; what the user said about the shapes of its weights must agree, and the rest is taken. Gives
/// how the folder stores its matrices, if as codes.
pub(crate) fn adopt_model(
    resolved: &mut Resolved,
    folder: &Path,
) -> Result<Option<Quantisation>, Failure> {
    let path = folder.join("config.json");
    let text = files::read_small_text(&path).map_err(|source| Failure::Unreadable {
        path: path.clone(),
        source,
    })?;
    let wrong = |source| Failure::HfConfig {
        path: path.clone(),
        source,
    };
    let model = ModelConfig::from_hf(&text).map_err(wrong)?;
    let stored = Quantisation::of(&text).map_err(wrong)?;
    let as_toml = |model: &ModelConfig| {
        toml::Table::try_from(model).map_err(|error| Failure::Usage(error.to_string()))
    };
    let (given, mut taken) = (as_toml(&resolved.config.model)?, as_toml(&model)?);
    for key in &resolved.explicit_model_keys {
        let name = key.trim_start_matches("model.");
        // A key of a section of its own goes with the whole section.
        let name = name.split('.').next().unwrap_or(name);
        if given.get(name) == taken.get(name) {
            continue;
        }
        let show = |value: Option<&toml::Value>| value.map_or("absent".into(), ToString::to_string);
        let (ours, theirs) = (show(given.get(name)), show(taken.get(name)));
        if !FREE_OF_SHAPES.contains(&name) {
            return Err(Failure::Usage(format!(
                "{key} is {ours}, but {} says {theirs}; leave the setting out, or start from another model",
                path.display(),
            )));
        }
        tracing::warn!(
            "model.{name} is {ours}, where {} says {theirs}",
            path.display()
        );
        match given.get(name) {
            Some(value) => taken.insert(name.into(), value.clone()),
            None => taken.remove(name),
        };
    }
    let model: ModelConfig = toml::Value::Table(taken)
        .try_into()
        .expect("each value was one of a model's before");
    resolved.config.model = model;
    resolved.context_length = resolved.config.model.context_length(&text);
    if let (Some(stored), Some(_)) = (&stored, resolved.config.lora.rank) {
        let has_experts = resolved.config.model.experts.is_some();
        resolved.config.lora.adopt_codes(stored, has_experts)?;
    }
    check::model(&resolved.config)?;
    check::contradictions(&resolved.config)?;
    Ok(stored)
}
