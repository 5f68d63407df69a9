//! `dataset.json`, which lists the shards of a folder, so that a missing shard is noticed.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{DataError, Result, Split, tokens::TokenFile};

/// A shard in `dataset.json`, in the list of its split: `train.shards`, `validation.shards`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedShard {
    /// The name of the `.bin` file.
    pub name: String,
    /// The tokens in it.
    pub tokens: u64,
}

impl ListedShard {
    /// The name of the file with the list.
    pub const FILE: &str = "dataset.json";
    /// Its `format_version`, which covers the folder's layout.
    pub const FORMAT_VERSION: u32 = 1;
}

/// The files and the tokenizer that prepared tokens were made from.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ListedOrigin {
    /// The tokenizer that made them.
    pub tokenizer: ListedTokenizer,
    /// The files and folders, as the user gave them.
    #[serde(default)]
    pub inputs: Vec<String>,
    /// The share of documents for validation, as the user gave it.
    #[serde(default)]
    pub validation_fraction: f64,
    /// Whether every two documents are a pair: the chosen one, and the rejected one.
    #[serde(default)]
    pub preferences: bool,
}

/// The entry in `dataset.json` that identifies a tokenizer.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ListedTokenizer {
    /// `bytes` or `hugging-face`.
    #[serde(default)]
    pub kind: String,
    /// CRC-32 of its `tokenizer.json`.
    #[serde(default)]
    pub crc32: Option<u32>,
    /// One more than its largest token.
    pub vocab: usize,
}

/// The listed shards of a split: their tokens, by name.
pub(crate) struct Listing {
    file: PathBuf,
    pub(crate) origin: ListedOrigin,
    shards: BTreeMap<String, u64>,
}

#[derive(Deserialize)]
struct Version {
    format_version: u32,
}

#[derive(Deserialize)]
struct Contents {
    #[serde(flatten)]
    origin: ListedOrigin,
    train: Part,
    validation: Part,
}

#[derive(Deserialize)]
struct Part {
    shards: Vec<ListedShard>,
}

impl Listing {
    /// Reads the list of a folder, if it has one.
    pub(crate) fn open(folder: &Path, split: Split) -> Result<Option<Self>> {
        let file = folder.join(ListedShard::FILE);
        let bytes = match files::read_small(&file) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(reason) => {
                let file = file.display().to_string();
                return Err(DataError::Unreadable { file, reason });
            }
        };
        match parse(&bytes) {
            Ok(contents) => {
                let Contents {
                    origin,
                    train,
                    validation,
                } = contents;
                let part = match split {
                    Split::Train => train,
                    _ if validation.shards.is_empty() => train,
                    _ => validation,
                };
                let shards = part.shards.into_iter();
                let shards = shards.map(|shard| (shard.name, shard.tokens)).collect();
                Ok(Some(Self {
                    file,
                    origin,
                    shards,
                }))
            }
            Err(reason) => Err(bad(&file, reason)),
        }
    }

    /// Refuses a model whose vocabulary is too small for the tokenizer, before such a token is read.
    pub(crate) fn check_vocab(&self, model: usize) -> Result {
        let vocab = self.origin.tokenizer.vocab;
        match vocab > model {
            false => Ok(()),
            true => Err(DataError::Unusable(format!(
                "{}: this data was prepared with a tokenizer of {vocab} tokens, and the model knows {model}; prepare it with the \
                 model's own: `trainer prepare ... --tokenizer MODEL` (a model without a folder may also have a larger model.vocab)",
                self.file.display()
            ))),
        }
    }

    /// Refuses shards that differ from the listed ones.
    pub(crate) fn check_names(&self, paths: &[PathBuf]) -> Result {
        let found: BTreeSet<_> = paths.iter().filter_map(|path| path.file_name()).collect();
        let listed: BTreeSet<_> = self.shards.keys().map(OsStr::new).collect();
        if let Some(name) = listed.difference(&found).next() {
            let reason = format!("lists {}, which is not beside it", name.display());
            return Err(bad(&self.file, reason));
        }
        if let Some(name) = found.difference(&listed).next() {
            let reason = format!("does not list {}, which is beside it", name.display());
            return Err(bad(&self.file, reason));
        }
        Ok(())
    }

    /// Refuses a shard whose number of tokens differs from the list.
    pub(crate) fn check_tokens(&self, path: &Path, shard: &TokenFile) -> Result {
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.unwrap_or_default();
        match self.shards.get(name) {
            Some(&listed) if listed != shard.tokens as u64 => {
                let held = shard.tokens;
                let reason = format!("lists {name} with {listed} tokens, but it holds {held}");
                Err(bad(&self.file, reason))
            }
            _ => Ok(()),
        }
    }
}

fn bad(file: &Path, reason: String) -> DataError {
    DataError::Unusable(format!(
        "{} {reason}; copy the folder again, or write the data again with `trainer prepare`, or remove that file to read the .bin \
         files that are there",
        file.display()
    ))
}

/// Reads the list. Errors are the rest of a sentence that begins with the file's name.
fn parse(bytes: &[u8]) -> Result<Contents, String> {
    fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
        let read = serde_json::from_slice(bytes);
        read.map_err(|error| format!("is not what `trainer prepare` writes ({error})"))
    }
    let Version { format_version } = read(bytes)?;
    if format_version != ListedShard::FORMAT_VERSION {
        let known = ListedShard::FORMAT_VERSION;
        return Err(format!(
            "has format_version {format_version}, of which only {known} is read"
        ));
    }
    read(bytes)
}
