//! The files that came with a model beside its weights. They are saved with it.

use super::config::dtype_name;
use super::families::PREDICTORS;
use super::wrapper::{SHARED, text_config};
use crate::ModelConfig;
use memory::DType;
use serde_json::{Map, Value};
use std::io;
use std::path::{Path, PathBuf};

/// Files of tokenizers.
const TOKENIZER: [&str; 10] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// Those from which a tokenizer can be made.
const VOCABULARIES: [&str; 4] = [
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "tekken.json",
];

/// Files for processing pictures.
const PROCESSORS: [&str; 3] = [
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
];

/// The settings for generating text that came with the model.
const GENERATION: &str = "generation_config.json";

/// A file that came with a model could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {path}: {source}")]
pub struct OriginError {
    /// The file.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

/// The files that came with a model beside its weights: its `config.json`, its tokenizer's files, its chat template and
/// its settings for generating text. A model that was made here has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    config: Option<String>,
    companions: Vec<(String, Vec<u8>)>,
    wrapper: Option<WrapperFiles>,
}

/// The files around the text part of a model for pictures and text.
#[derive(Clone, Debug, PartialEq, Eq)]
struct WrapperFiles {
    /// The text of `config.json`.
    config: String,
    processors: Vec<(String, Vec<u8>)>,
}

impl Origin {
    /// Reads these files from a model's folder; `config.json` must exist. That of a model for pictures and text is read as the
    /// one of its text part; [`WholeModel`](crate::WholeModel) writes the others.
    ///
    /// # Errors
    /// [`OriginError`] that names the file.
    pub fn read(folder: &Path) -> Result<Origin, OriginError> {
        let path = folder.join("config.json");
        let text = files::read_small_text(&path);
        let text = text.map_err(|source| OriginError { path, source })?;
        let names = TOKENIZER.into_iter().chain([GENERATION]);
        let companions = read_present(folder, names)?;
        let (config, wrapper) = match text_config(&text) {
            None => (text, None),
            Some(part) => {
                let wrapper = WrapperFiles {
                    config: text,
                    processors: read_present(folder, PROCESSORS)?,
                };
                (in_text(&part), Some(wrapper))
            }
        };
        Ok(Origin {
            config: Some(config),
            companions,
            wrapper,
        })
    }

    /// The same, with the tokenizer from another folder, such as that of prepared data, if the model has none.
    ///
    /// # Errors
    /// [`OriginError`] that names the file.
    pub fn with_tokenizer_from(mut self, folder: &Path) -> Result<Origin, OriginError> {
        let of_tokenizer = |names: &[&str], name: &str| names.contains(&name);
        if !self.names().any(|name| of_tokenizer(&VOCABULARIES, name)) {
            let found = read_present(folder, TOKENIZER)?;
            if !found.is_empty() {
                let own = |(name, _): &(String, Vec<u8>)| !of_tokenizer(&TOKENIZER, name);
                self.companions.retain(own);
                self.companions.extend(found);
            }
        }
        Ok(self)
    }

    /// The text of the `config.json` that the model came with.
    pub fn config(&self) -> Option<&str> {
        self.config.as_deref()
    }

    /// The names of the files that are saved with the model beside `config.json`.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.companions.iter().map(|(name, _)| name.as_str())
    }

    /// Names and contents of all files of the model's folder but its weights, `config.json` last. The original
    /// `config.json` changes only in the type of the weights, and in dropout and the norms' epsilon if `model` has
    /// others. A new one is made, for sequences of `seq` tokens, if there is none or it describes another model.
    pub fn files(&self, model: &ModelConfig, seq: usize, dtype: DType) -> Vec<(String, Vec<u8>)> {
        let original = self
            .config()
            .and_then(|text| describing(text, model, (seq, dtype)));
        let config = original
            .and_then(|text| with_dtype(&text, dtype_name(dtype)))
            .unwrap_or_else(|| self.new_config(&model.to_hf(seq, dtype)));
        let mut files = self.companions.clone();
        files.push(("config.json".into(), config.into_bytes()));
        files
    }

    /// Whether it is a model for pictures and text.
    pub(super) fn has_wrapper(&self) -> bool {
        self.wrapper.is_some()
    }

    /// The files of its text part, as [`Origin::files`] gives them, with those around it.
    pub(super) fn around(&self, mut text: Vec<(String, Vec<u8>)>) -> Vec<(String, Vec<u8>)> {
        let Some(wrapper) = &self.wrapper else {
            return text;
        };
        let (_, config) = text.pop().expect("config.json is the last of them");
        let wrapped = rewrapped(&wrapper.config, &config);
        let wrapped = wrapped.expect("the wrapper was read as one");
        text.extend(wrapper.processors.iter().cloned());
        text.push(("config.json".into(), wrapped.into_bytes()));
        text
    }

    /// A new `config.json` with the tokenizer's ids for the begin and end of sequences.
    fn new_config(&self, text: &str) -> String {
        let mut config: Map<String, Value> =
            serde_json::from_str(text).expect("it was written as JSON");
        for (key, token) in [("bos_token_id", "bos_token"), ("eos_token_id", "eos_token")] {
            if let Some(id) = self.special_id(token) {
                config[key] = id;
            }
        }
        in_text(&config)
    }

    /// The id that the tokenizer gives to one of its special tokens.
    fn special_id(&self, token: &str) -> Option<Value> {
        let settings = self.json("tokenizer_config.json")?;
        let content = match &settings[token] {
            Value::Object(token) => token.get("content")?,
            content => content,
        };
        let tokenizer = self.json("tokenizer.json")?;
        let mut added = tokenizer["added_tokens"].as_array()?.iter();
        let token = added.find(|token| token["content"] == *content)?;
        token["id"].as_u64().map(Value::from)
    }

    fn json(&self, name: &str) -> Option<Value> {
        let (_, bytes) = self.companions.iter().find(|(own, _)| own == name)?;
        serde_json::from_slice(bytes).ok()
    }
}

/// The files with these names that exist in a folder.
fn read_present<'a>(
    folder: &Path,
    names: impl IntoIterator<Item = &'a str>,
) -> Result<Vec<(String, Vec<u8>)>, OriginError> {
    let read = |name: &str| {
        let path = folder.join(name);
        match files::read_small(&path) {
            Ok(bytes) => Some(Ok((name.to_string(), bytes))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(source) => Some(Err(OriginError { path, source })),
        }
    };
    names.into_iter().filter_map(read).collect()
}

/// The text of a `config.json` with the dropout and the norms' epsilon of `model`; none if it describes another model.
fn describing(text: &str, model: &ModelConfig, (seq, dtype): (usize, DType)) -> Option<String> {
    let described = ModelConfig::from_hf(text).ok()?;
    if described == *model {
        return Some(text.into());
    }
    let (dropout, norm_eps) = (model.dropout, model.norm_eps);
    // Losses of routers belong to a training run, not to the model.
    let changed = ModelConfig {
        dropout,
        norm_eps,
        router_aux: model.router_aux,
        router_aux_kind: model.router_aux_kind,
        router_z_loss: model.router_z_loss,
        ..described.clone()
    };
    if changed != *model {
        return None;
    }
    let keys = |of: &ModelConfig| serde_json::from_str::<Map<String, Value>>(&of.to_hf(seq, dtype));
    let (before, after) = (keys(&described).ok()?, keys(model).ok()?);
    let mut config: Map<String, Value> = serde_json::from_str(text).ok()?;
    let is_changed = |(key, value): &(String, Value)| before.get(key) != Some(value);
    config.extend(after.into_iter().filter(is_changed));
    Some(in_text(&config))
}

/// A `config.json` with this type of weights; the same text if nothing changes.
fn with_dtype(text: &str, dtype: &str) -> Option<String> {
    let original: Map<String, Value> = serde_json::from_str(text).ok()?;
    let mut config = original.clone();
    // What was quantised is widened when it is read.
    config.shift_remove("quantization_config");
    for key in PREDICTORS {
        if let Some(predictors) = config.get_mut(key) {
            *predictors = 0.into();
        }
    }
    let mut keys = vec!["dtype", "torch_dtype"];
    keys.retain(|key| original.contains_key(*key));
    if keys.is_empty() {
        keys.push("torch_dtype");
    }
    for key in keys {
        config.insert(key.into(), dtype.into());
    }
    match config == original {
        true => Some(text.to_string()),
        false => Some(in_text(&config)),
    }
}

/// The `config.json` of a wrapper with what `written`, the one of its text part alone, says otherwise.
fn rewrapped(wrapper: &str, written: &[u8]) -> Option<String> {
    const QUANTISED: &str = "quantization_config";
    let before = text_config(wrapper)?;
    let after: Map<String, Value> = serde_json::from_slice(written).ok()?;
    if before == after {
        return Some(wrapper.into());
    }
    let mut whole: Map<String, Value> = serde_json::from_str(wrapper).ok()?;
    let mut text = whole.get("text_config")?.as_object()?.clone();
    let is_changed = |(key, value): &(String, Value)| before.get(key) != Some(value);
    for (key, value) in after.clone().into_iter().filter(is_changed) {
        let (is_shared, is_own) = (SHARED.contains(&&key[..]), text.contains_key(&key));
        if is_shared && (!is_own || whole.contains_key(&key)) {
            whole.insert(key.clone(), value.clone());
        }
        if is_own || !is_shared {
            text.insert(key, value);
        }
    }
    if !after.contains_key(QUANTISED) {
        whole.shift_remove(QUANTISED);
        text.shift_remove(QUANTISED);
    }
    whole.insert("text_config".into(), text.into());
    Some(in_text(&whole))
}

fn in_text(config: &Map<String, Value>) -> String {
    let text = serde_json::to_string_pretty(config).expect("keys are strings");
    format!("{text}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA: &str = r#"{"architectures": ["MistralForCausalLM"], "_name_or_path": "somebody/some-model",
        "model_type": "mistral", "zzz": {"deep": [1, null, 2.5]}, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3,
        "intermediate_size": 100, "vocab_size": 131, "max_position_embeddings": 256, "eos_token_id": [7, 9], "dtype": "float32",
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}, "unheard_of": true}"#;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    fn text(files: &[(String, Vec<u8>)], name: &str) -> String {
        let (_, bytes) = files.iter().find(|(own, _)| own == name).unwrap();
        String::from_utf8(bytes.clone()).unwrap()
    }

    fn object(text: &str) -> Map<String, Value> {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn all_that_came_with_a_model_goes_out_with_it() {
        let came = [
            ("config.json", LLAMA),
            ("tokenizer.json", "{}"),
            ("generation_config.json", "{\"top_k\": 3}"),
            ("chat_template.jinja", "{{ messages }}"),
            ("README.md", "theirs"),
        ];
        let origin = Origin::read(folder(&came).path()).unwrap();
        let model = ModelConfig::from_hf(LLAMA).unwrap();
        let files = origin.files(&model, 16, DType::F32);
        assert_eq!(files.last().unwrap().0, "config.json", "it comes last");
        assert_eq!(files.len(), 4, "the page about the model is no longer true");
        for (name, contents) in &came[..4] {
            assert_eq!(text(&files, name), *contents, "to the byte");
        }
    }

    #[test]
    fn dropout_of_ones_own_goes_into_the_config_that_came() {
        let came = r#"{"model_type": "gpt2", "n_embd": 12, "n_layer": 2, "n_head": 3, "vocab_size": 20, "n_positions": 16,
            "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "unheard_of": true}"#;
        let origin = Origin::read(folder(&[("config.json", came)]).path()).unwrap();
        let described = ModelConfig::from_hf(came).unwrap();
        let model = ModelConfig {
            dropout: 0.0,
            ..described.clone()
        };
        assert_ne!(model, described);
        let written = text(&origin.files(&model, 16, DType::F32), "config.json");
        assert_eq!(ModelConfig::from_hf(&written).unwrap(), model);
        assert_eq!(object(&written)["unheard_of"], true);
    }

    #[test]
    fn only_the_type_changes_in_a_config() {
        let (original, model) = (object(LLAMA), ModelConfig::from_hf(LLAMA).unwrap());
        let old = LLAMA.replace("\"dtype\"", "\"torch_dtype\"");
        let neither = LLAMA.replace("\"dtype\": \"float32\",", "");
        for (given, key) in [
            (LLAMA, "dtype"),
            (&old, "torch_dtype"),
            (&neither, "torch_dtype"),
        ] {
            let origin = Origin::read(folder(&[("config.json", given)]).path()).unwrap();
            let mut written = object(&text(&origin.files(&model, 16, DType::BF16), "config.json"));
            assert_eq!(written.shift_remove(key), Some("bfloat16".into()));
            let mut expected = original.clone();
            expected.shift_remove("dtype");
            let in_order = |map: &Map<String, Value>| serde_json::to_string(map).unwrap();
            assert_eq!(in_order(&written), in_order(&expected));
        }
    }

    #[test]
    fn a_config_of_another_model_is_none_of_this_one() {
        let origin = Origin::read(folder(&[("config.json", LLAMA)]).path()).unwrap();
        let mut model = ModelConfig::from_hf(LLAMA).unwrap();
        model.layers = 1;
        let written = text(&origin.files(&model, 16, DType::F32), "config.json");
        assert_eq!(ModelConfig::from_hf(&written).unwrap(), model);
        // The file must promise the positions that the scaling reaches.
        assert_eq!(object(&written)["max_position_embeddings"], 8 * 8192);
    }

    #[test]
    fn a_model_made_here_takes_the_tokenizer_of_its_data() {
        let data = folder(&[
            (
                "tokenizer.json",
                r#"{"added_tokens": [{"id": 5, "content": "<s>"}, {"id": 6, "content": "</s>"}]}"#,
            ),
            (
                "tokenizer_config.json",
                r#"{"bos_token": null, "eos_token": {"content": "</s>"}}"#,
            ),
            ("generation_config.json", "of another model"),
        ]);
        let origin = Origin::default().with_tokenizer_from(data.path()).unwrap();
        assert_eq!(
            origin.names().collect::<Vec<_>>(),
            ["tokenizer.json", "tokenizer_config.json"]
        );
        let mut model = ModelConfig::from_hf(LLAMA).unwrap();
        model.rope_scaling = None;
        let config = object(&text(&origin.files(&model, 16, DType::F32), "config.json"));
        assert_eq!(
            (&config["eos_token_id"], &config["bos_token_id"]),
            (&6.into(), &Value::Null)
        );
        assert_eq!(config["max_position_embeddings"], 16);

        let own = folder(&[("config.json", LLAMA), ("tokenizer.model", "own")]);
        let own = Origin::read(own.path()).unwrap();
        assert_eq!(own.clone().with_tokenizer_from(data.path()).unwrap(), own);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named() {
        let empty = folder(&[]);
        let message = Origin::read(empty.path()).unwrap_err().to_string();
        assert!(message.contains("config.json: "), "{message}");
        let odd = folder(&[("config.json", LLAMA)]);
        std::fs::create_dir(odd.path().join("merges.txt")).unwrap();
        let message = Origin::read(odd.path()).unwrap_err().to_string();
        assert!(message.contains("merges.txt: "), "{message}");
    }
}
