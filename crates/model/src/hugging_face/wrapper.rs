//! Folders of models for pictures and text, whose text part is a model of its own: where their files have its keys and its
//! tensors.

use super::families::Family;
use super::keys::{HfConfigError, check_architecture};
use files::{Dtype, Tensors, unique_json};
use serde_json::{Map, Value};
use std::fmt;

/// The `model_type` and the class of each. To add one whose tensors have other names, add these too.
const WRAPPERS: [(&str, &str); 4] = [
    ("mistral3", "Mistral3ForConditionalGeneration"),
    ("gemma3", "Gemma3ForConditionalGeneration"),
    ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
];

/// Beginnings of our tensors' names, and of those in older and newer files.
const TEXT: [(&str, &str); 3] = [
    ("model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.", "model.language_model."),
];

/// The beginning of the names of the tensors for pictures in files of Qwen, which exports have too.
const VISUAL: &str = "model.visual.";

/// Beginnings of the names of the tensors for pictures, in older and newer files.
const PICTURES: [&str; 5] = [
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    VISUAL,
];

/// Keys that stand beside the text part's own and are true of it.
pub(super) const SHARED: [&str; 4] = [
    "dtype",
    "torch_dtype",
    "quantization_config",
    "transformers_version",
];

/// The names that are read beside those of families.
pub(super) fn model_types() -> impl Iterator<Item = &'static str> {
    WRAPPERS.iter().map(|(name, _)| *name)
}

/// The keys of the text part as a `config.json` of its own family; those of other models as they are.
///
/// # Errors
/// [`HfConfigError`] if the class is another, or the text part's keys are missing.
pub(super) fn text_part(mut json: Value) -> Result<Value, HfConfigError> {
    let mut wrappers = WRAPPERS.iter();
    let Some((model_type, class)) = wrappers.find(|(name, _)| json["model_type"] == *name) else {
        return Ok(json);
    };
    check_architecture(&json, model_type, class)?;
    let Value::Object(mut text) = json["text_config"].take() else {
        return Err(HfConfigError::Key("text_config", "an object"));
    };
    let family = text.get("model_type").and_then(Value::as_str);
    if let Some(family) = family.and_then(Family::find) {
        text.insert("architectures".into(), vec![family.class()].into());
    }
    // transformers assumes a tied head beside the text part, and unties one that the weights have all the same. So only
    // the text part's own key tells such models apart.
    const TIED: &str = "tie_word_embeddings";
    // Qwen's wrapper assumes an untied head, and its own key alone counts.
    let is_of_qwen = model_type.starts_with("qwen");
    let is_tied = json[TIED].as_bool().or(is_of_qwen.then_some(false));
    if let Some(is_tied) = is_tied.filter(|is_tied| is_of_qwen || !is_tied) {
        text.insert(TIED.into(), is_tied.into());
    }
    const CAP: &str = "final_logit_softcapping";
    let cap = text.get(CAP).filter(|cap| !cap.is_null());
    if let Some(cap) = cap.filter(|_| *model_type == "gemma3") {
        let ignored = format!("{cap}, which {class} never applies,");
        return Err(HfConfigError::Unsupported(CAP, ignored));
    }
    for key in SHARED {
        if !json[key].is_null() && !text.contains_key(key) {
            text.insert(key.into(), json[key].take());
        }
    }
    Ok(text.into())
}

/// The same for the text of a file; none if it is not one of a wrapper.
pub(super) fn text_config(text: &str) -> Option<Map<String, Value>> {
    let json: Value = unique_json(text).ok()?;
    match text_part(json.clone()) {
        Ok(Value::Object(part)) if Value::Object(part.clone()) != json => Some(part),
        _ => None,
    }
}

/// The names that a tensor of the model may have in files: its own, and those in files of wrappers.
pub(super) fn names(name: &str) -> impl Iterator<Item = String> {
    let wrapped = TEXT.into_iter().filter_map(move |(own, beginning)| {
        let rest = name.strip_prefix(own)?;
        Some(format!("{beginning}{rest}"))
    });
    std::iter::once(name.to_string()).chain(wrapped)
}

/// The name that a tensor has in some files, if they have it.
pub(super) fn stored_name(tensors: &Tensors, name: &str) -> Option<String> {
    names(name).find(|name| tensors.get(name).is_some())
}

/// The name of a tensor of the model among these of a folder, whose files may have it in other pieces.
pub(super) fn name_among(folder: &[&str], name: &str) -> String {
    let wrapped = TEXT.into_iter().find_map(|(own, beginning)| {
        let rest = name.strip_prefix(own)?;
        let mut folder = folder.iter();
        let is_used = folder.any(|name| name.starts_with(beginning));
        is_used.then(|| format!("{beginning}{rest}"))
    });
    wrapped.unwrap_or_else(|| name.into())
}

/// Tensors of a folder that are not read, because they are no part of the model.
#[derive(Debug, Default, PartialEq)]
pub struct LeftOut {
    parts: Vec<LeftOutPart>,
    is_exported: bool,
}

/// The types of quantised weights.
const CODES: [Dtype; 4] = [Dtype::F8_E4M3, Dtype::F8_E5M2, Dtype::U8, Dtype::I8];

/// Those of one kind.
#[derive(Debug, PartialEq)]
pub(super) struct LeftOutPart {
    /// The beginnings of their names.
    pub(super) beginnings: Vec<String>,
    pub(super) reason: &'static str,
}

impl LeftOutPart {
    /// The tensors for pictures, in files that have the model under the names of a wrapper.
    pub(super) fn pictures<'a>(
        tensors: &Tensors,
        mut found: impl Iterator<Item = &'a str>,
    ) -> Option<LeftOutPart> {
        found.find(|name| TEXT.iter().any(|(_, wrapped)| name.starts_with(wrapped)))?;
        let reason = "they are the model's part for pictures, which is not trained";
        LeftOutPart::those_there(tensors, &PICTURES, reason)
    }

    /// The tensors whose names begin so, if there are some.
    pub(super) fn those_there(
        tensors: &Tensors,
        beginnings: &[&str],
        reason: &'static str,
    ) -> Option<LeftOutPart> {
        let names = tensors.names();
        let is_there = |beginning: &&str| names.iter().any(|name| name.starts_with(beginning));
        let beginnings = beginnings.iter().copied().filter(is_there);
        let beginnings: Vec<String> = beginnings.map(Into::into).collect();
        (!beginnings.is_empty()).then_some(LeftOutPart { beginnings, reason })
    }
}

impl LeftOut {
    /// All parts, if there are some.
    pub(super) fn of(
        tensors: &Tensors,
        parts: impl IntoIterator<Item = Option<LeftOutPart>>,
    ) -> Option<LeftOut> {
        let parts: Vec<LeftOutPart> = parts.into_iter().flatten().collect();
        let mut left_out = LeftOut {
            parts,
            is_exported: false,
        };
        let mut names = tensors.names();
        names.retain(|name| left_out.has(name));
        // An export says nothing of codes, so none are copied into it.
        let is_plain = |name: &&str| {
            let tensor = tensors.get(name);
            tensor.is_some_and(|tensor| !CODES.contains(&tensor.dtype))
        };
        left_out.is_exported =
            left_out.beginnings().any(|it| it == VISUAL) && names.iter().all(is_plain);
        (!left_out.parts.is_empty()).then_some(left_out)
    }

    /// Whether exports copy them from the folder ([`WholeModel`](crate::WholeModel)).
    pub fn is_exported(&self) -> bool {
        self.is_exported
    }

    /// The beginnings of their names.
    pub fn beginnings(&self) -> impl Iterator<Item = &str> {
        self.parts
            .iter()
            .flat_map(|part| &part.beginnings)
            .map(|it| &it[..])
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.beginnings()
            .any(|beginning| name.starts_with(beginning))
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        for (number, part) in self.parts.iter().enumerate() {
            let names = part.beginnings.iter().map(|name| format!("`{name}*`"));
            let names = names.collect::<Vec<_>>().join(", ");
            let before = if number == 0 { "" } else { "; " };
            write!(
                f,
                "{before}tensors of {names} are left out: {}",
                part.reason
            )?;
        }
        match self.is_exported {
            true => write!(f, "; an export copies them from here"),
            false => write!(f, "; an export is without them"),
        }
    }
}
