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

/// Refuses what people name in place of a model's folder: a name of the hub, and files that are made for inference alone.
pub(crate) fn refuse_what_is_no_folder(path: &Path) -> Result<(), Failure> {
    let shown = path.display();
    if is_hub_name(path) {
        let name = path.file_name().unwrap_or_default().display();
        return Err(Failure::NoModelFolder {
            why: format!("there is no folder {shown}, and models are not downloaded here"),
            hint: format!(
                "`hf download {shown} --local-dir {name}` (pip install huggingface_hub) brings a model of the hub; give {name} in place \
                 of {shown}"
            ),
        });
    }
    if is_gguf(path) {
        return Err(Failure::NoModelFolder {
            why: format!("{shown} has a model as GGUF, a form for inference that is not read here"),
            hint: "take the model that it was made from, in safetensors (`hf download OWNER/NAME --local-dir DIR`), or let transformers \
                   make a folder: `from_pretrained(DIR, gguf_file=FILE, quantization_config=GgufConfig(dequantize=True))` reads it, \
                   and `save_pretrained(OUT)` writes that"
                .into(),
        });
    }
    Ok(())
}

/// Whether a path that does not exist looks like the name of a model on the hub: `owner/name`.
fn is_hub_name(path: &Path) -> bool {
    let Some((owner, name)) = path.to_str().and_then(|text| text.split_once('/')) else {
        return false;
    };
    let is_name = |part: &str| {
        let is_known = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
        part.starts_with(|first: char| first.is_ascii_alphanumeric()) && part.chars().all(is_known)
    };
    is_name(owner) && is_name(name) && !Path::new(owner).exists()
}

/// Whether a path is a GGUF file, or a folder with such and without a model.
fn is_gguf(path: &Path) -> bool {
    let ends = |path: &Path| {
        path.extension()
            .is_some_and(|end| end.eq_ignore_ascii_case("gguf"))
    };
    if path.is_file() {
        return ends(path);
    }
    let mut entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    !path.join("config.json").exists() && entries.any(|entry| ends(&entry.path()))
}

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
    refuse_what_is_no_folder(folder)?;
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
    let show = |value: Option<&toml::Value>| value.map_or("absent".into(), ToString::to_string);
    let contradicts = |key: &str, ours: &str, theirs: &str| {
        Failure::Usage(format!(
            "{key} is {ours}, but {} says {theirs}; leave the setting out, or start from another model",
            path.display(),
        ))
    };
    for (section, part) in &resolved.model_parts {
        for (key, ours) in part.as_table().into_iter().flatten() {
            let theirs = taken.get(section).and_then(|theirs| theirs.get(key));
            if theirs != Some(ours) {
                let key = format!("model.{section}.{key}");
                return Err(contradicts(&key, &ours.to_string(), &show(theirs)));
            }
        }
    }
    for key in &resolved.explicit_model_keys {
        let name = key.trim_start_matches("model.");
        // A key of a section of its own goes with the whole section.
        let name = name.split('.').next().unwrap_or(name);
        if given.get(name) == taken.get(name) || resolved.model_parts.contains_key(name) {
            continue;
        }
        let (ours, theirs) = (show(given.get(name)), show(taken.get(name)));
        if !FREE_OF_SHAPES.contains(&name) {
            return Err(contradicts(key, &ours, &theirs));
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
