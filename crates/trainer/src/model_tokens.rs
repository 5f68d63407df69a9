//! Which tokens a model knows, and whether data has them. Only this file decides what a model may read.

use crate::failure::{Failure, Result};
use crate::shell::quoted;
use checkpoint::STATE_FILE;
use data::{DataError, Dataset, ListedOrigin, Options, TokensOf};
use serde_json::Value;
use settings::Config;
use std::path::{Path, PathBuf};
use tokenization::Tokenizer;

/// A model with this many tokens may have one for each byte.
const BYTES: usize = 256;

/// What the tokens of a model stand for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ModelTokens {
    /// Nothing yet: its weights are random.
    Untrained {
        /// Number of tokens.
        vocab: usize,
    },
    /// Bytes, according to the run that trained it.
    Bytes,
    /// The output of the `tokenizer.json` in this folder.
    Tokenizer(PathBuf),
    /// No file says. With 256 tokens, they are taken for bytes.
    Unknown {
        /// Number of tokens.
        vocab: usize,
    },
}

impl ModelTokens {
    /// The tokenizer that makes these tokens from text; none if no file names it.
    ///
    /// # Errors
    /// If the tokenizer's files cannot be read.
    pub(crate) fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        Ok(match self {
            ModelTokens::Tokenizer(folder) => Some(Tokenizer::open(folder)?),
            _ if self.reads_bytes() => Some(Tokenizer::bytes()),
            _ => None,
        })
    }

    /// The tokens of the model in a folder, which may be a checkpoint.
    pub(crate) fn of_folder(folder: &Path, vocab: usize) -> ModelTokens {
        // Files may not be added to a checkpoint, because it would change. So the run's folder may have them.
        let parent = folder
            .parent()
            .filter(|parent| parent.ends_with("checkpoints"));
        let run = parent.and_then(Path::parent);
        let mut folders = [Some(folder), run].into_iter().flatten();
        let has_tokenizer = |folder: &&Path| folder.join("tokenizer.json").is_file();
        if let Some(folder) = folders.find(has_tokenizer) {
            return ModelTokens::Tokenizer(folder.into());
        }
        match json(&folder.join(STATE_FILE))["reads_bytes"] {
            Value::Bool(true) => ModelTokens::Bytes,
            _ => ModelTokens::Unknown { vocab },
        }
    }

    /// The tokens of the model that a run starts from: a folder's, or an untrained one's.
    pub(crate) fn of_run(vocab: usize, from: Option<&Path>) -> ModelTokens {
        match from {
            None => ModelTokens::Untrained { vocab },
            Some(folder) => ModelTokens::of_folder(folder, vocab),
        }
    }

    /// The tokens of the same model after it was trained on this data.
    pub(crate) fn after(self, dataset: &Dataset) -> ModelTokens {
        if matches!(self, ModelTokens::Bytes | ModelTokens::Tokenizer(_)) {
            return self;
        }
        let mut inputs = dataset.inputs();
        let own = inputs.find_map(|(path, tokens)| match path {
            _ if is_of_bytes(&tokens) => Some(ModelTokens::Bytes),
            Some(path) if path.join("tokenizer.json").is_file() => {
                Some(ModelTokens::Tokenizer(path.into()))
            }
            _ => None,
        });
        own.unwrap_or(self)
    }

    /// Whether each byte of a text is a token.
    pub(crate) fn reads_bytes(&self) -> bool {
        matches!(
            self,
            ModelTokens::Bytes | ModelTokens::Unknown { vocab: BYTES }
        )
    }

    /// Opens data. If a file is neither text nor tokens, the failure says how to make tokens for this model.
    ///
    /// # Errors
    /// As [`Dataset::open`].
    pub(crate) fn open(&self, options: &Options) -> Result<Dataset> {
        Dataset::open(options).map_err(|error| match &error {
            DataError::NotText { file, kind } if kind.can_be_prepared() => Failure::ForeignData {
                command: Some(self.prepare_command(
                    std::slice::from_ref(file),
                    Path::new(file),
                    0.0,
                )),
                why: error.to_string(),
            },
            _ => error.into(),
        })
    }

    /// Opens data that this model may read.
    ///
    /// # Errors
    /// As [`ModelTokens::open`], and [`Failure::ForeignData`] if tokens mean something else to the model, unless
    /// `data.any_tokenizer` allows them.
    pub(crate) fn open_own(&self, options: &Options, config: &Config) -> Result<Dataset> {
        let dataset = self.open(options)?;
        if !config.data.any_tokenizer {
            self.check(&dataset)?;
        }
        Ok(dataset)
    }

    /// Refuses data whose tokens are not this model's.
    ///
    /// # Errors
    /// [`Failure::ForeignData`] with the command that makes the right ones.
    pub(crate) fn check(&self, dataset: &Dataset) -> Result {
        let mut first: Option<(Option<&Path>, TokensOf)> = None;
        for (path, tokens) in dataset.inputs() {
            match &tokens {
                TokensOf::Unknown => continue,
                TokensOf::Bytes => self.check_text(path)?,
                TokensOf::Prepared(origin) => {
                    self.check_prepared(path.unwrap_or(Path::new("")), origin)?;
                }
            }
            match &first {
                Some((other, kind)) if !are_alike((*other, kind), (path, &tokens)) => {
                    let [one, other] = [*other, path].map(name);
                    return Err(Failure::ForeignData {
                        why: format!(
                            "{one} and {other} have tokens of different tokenizers; prepare them with the same one{PASS}"
                        ),
                        command: None,
                    });
                }
                Some(_) => {}
                None => first = Some((path, tokens)),
            }
        }
        Ok(())
    }

    fn check_text(&self, path: Option<&Path>) -> Result {
        let reads = match self {
            ModelTokens::Untrained { .. } => return Ok(()),
            _ if self.reads_bytes() => return Ok(()),
            ModelTokens::Tokenizer(folder) => {
                format!(
                    "reads the tokens of {}",
                    folder.join("tokenizer.json").display()
                )
            }
            ModelTokens::Bytes | ModelTokens::Unknown { .. } => {
                "has other tokens, and no tokenizer.json says which".into()
            }
        };
        let (what, input) = match path {
            Some(path) => (format!("{} is text", path.display()), path),
            None => ("the built-in data is text".into(), Path::new("TEXT")),
        };
        Err(Failure::ForeignData {
            why: format!(
                "{what}, each byte of which would be a token, but the model {reads}; prepare the text for it{PASS}"
            ),
            command: Some(self.prepare_command(&[input.display().to_string()], input, 0.0)),
        })
    }

    fn check_prepared(&self, folder: &Path, origin: &ListedOrigin) -> Result {
        let is_bytes = origin.tokenizer.kind == "bytes";
        let (is_own, own) = match self {
            ModelTokens::Untrained { .. } | ModelTokens::Unknown { .. } => return Ok(()),
            ModelTokens::Bytes => (is_bytes, "bytes".into()),
            ModelTokens::Tokenizer(model) => (
                !is_bytes && has_tokenizer_of(folder, origin, model),
                format!("{}, the model's", model.join("tokenizer.json").display()),
            ),
        };
        if is_own {
            return Ok(());
        }
        let with = match is_bytes {
            true => "bytes as tokens",
            false => "another tokenizer",
        };
        let why = format!(
            "{} was prepared with {with}, not with {own}: its tokens mean something else to the model; prepare it again{PASS}",
            folder.display()
        );
        let inputs = match &origin.inputs[..] {
            [] => &["INPUT".to_string()],
            inputs => inputs,
        };
        let command = self.prepare_command(inputs, folder, origin.validation_fraction);
        Err(Failure::ForeignData {
            why,
            command: Some(command),
        })
    }

    /// The command that makes tokens for this model from inputs, in a folder beside `place`.
    fn prepare_command(&self, inputs: &[String], place: &Path, validation: f64) -> String {
        let tokenizer = match self {
            ModelTokens::Tokenizer(folder) => folder.display().to_string(),
            ModelTokens::Untrained { vocab: BYTES } => "bytes".into(),
            _ if self.reads_bytes() => "bytes".into(),
            _ => "TOKENIZER".into(),
        };
        let name = place.file_name().unwrap_or(place.as_os_str());
        let name = name.to_string_lossy();
        let stem = name.split('.').find(|part| !part.is_empty());
        let out = place.with_file_name(format!("{}-tokens", stem.unwrap_or("data")));
        let mut words = vec!["trainer".into(), "prepare".into()];
        words.extend_from_slice(inputs);
        words.extend(["--tokenizer".into(), tokenizer]);
        if validation > 0.0 {
            words.extend(["--validation".into(), validation.to_string()]);
        }
        words.extend(["--out".into(), out.display().to_string()]);
        let words: Vec<String> = words.iter().map(|word| quoted(word)).collect();
        words.join(" ")
    }
}

/// How to skip the check, as the end of a sentence.
const PASS: &str = ", or take it as it is with --set data.any_tokenizer=true";

/// Whether an input has one token for each byte of a text.
pub(crate) fn is_of_bytes(tokens: &TokensOf) -> bool {
    match tokens {
        TokensOf::Bytes => true,
        TokensOf::Prepared(origin) => origin.tokenizer.kind == "bytes",
        TokensOf::Unknown => false,
    }
}

/// Says in a line what a run reads, and whether text is read as bytes.
pub(crate) fn describe(dataset: &Dataset) -> String {
    let is_text = dataset
        .inputs()
        .any(|(_, tokens)| tokens == TokensOf::Bytes);
    let note = match is_text {
        true => " (of text each byte is a token; `trainer prepare` makes tokens with a tokenizer)",
        false => "",
    };
    format!("{}{note}", dataset.describe())
}

fn name(path: Option<&Path>) -> String {
    path.map_or("the built-in text".into(), |path| {
        path.display().to_string()
    })
}

/// Whether two inputs have tokens of the same tokenizer.
fn are_alike(one: (Option<&Path>, &TokensOf), other: (Option<&Path>, &TokensOf)) -> bool {
    match (one, other) {
        ((Some(one), TokensOf::Prepared(first)), (Some(folder), TokensOf::Prepared(origin)))
            if first.tokenizer.kind != "bytes" =>
        {
            first.tokenizer == origin.tokenizer || has_tokenizer_of(folder, origin, one)
        }
        (one, other) => is_of_bytes(one.1) && is_of_bytes(other.1),
    }
}

/// Whether prepared data has the tokens of a folder's tokenizer: of the same file, or of one with equal contents.
fn has_tokenizer_of(data: &Path, origin: &ListedOrigin, folder: &Path) -> bool {
    let file = folder.join("tokenizer.json");
    let own = files::read_small(&file).unwrap_or_default();
    if origin.tokenizer.crc32 == Some(crc32fast::hash(&own)) {
        return true;
    }
    let says = |path: &Path| {
        let mut json = json(path);
        // These two are settings of the last use, which `prepare` ignores.
        for name in ["truncation", "padding"] {
            json.as_object_mut().map(|json| json.remove(name));
        }
        json
    };
    let (own, other) = (says(&file), says(&data.join("tokenizer.json")));
    !own.is_null() && own == other
}

/// Reads JSON from a file. Null if the file is missing or has something else.
pub(crate) fn json(path: &Path) -> Value {
    let text = files::read_small_text(path).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}
