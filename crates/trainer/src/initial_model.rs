//! The model that `--init-from` names.

use crate::failure::{Failure, Result};
use model::{ModelConfig, Quantisation};
use settings::{Completed, FolderModel};
use std::path::Path;

/// Refuses what people name in place of a model's folder: a name of the hub, and files that are made for inference alone.
pub(crate) fn refuse_what_is_no_folder(path: &Path) -> Result {
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

/// What to know of sequences that are longer than those that the model was made for, where its folder says so. One with learned
/// positions has no others.
pub(crate) fn beyond_context(command: &Completed, seq: usize) -> Option<String> {
    let longest = command.context_length.filter(|longest| seq > *longest)?;
    Some(format!(
        "sequences have {seq} tokens, and the model was made for up to {longest} (max_position_embeddings of its config.json): it has \
         not learnt the positions beyond; take --seq {longest}, or stretch them by model.rope_scaling"
    ))
}

/// The model of a folder.
pub(crate) fn read_model(folder: &Path) -> Result<FolderModel> {
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
    Ok(FolderModel {
        path: folder.into(),
        model: ModelConfig::from_hf(&text).map_err(wrong)?,
        stored: Quantisation::of(&text).map_err(wrong)?,
        adapters: None,
        text,
    })
}
