//! `dataset.json`, which describes the data set.

use crate::warnings::Warnings;
use data::ListedShard;
use serde::Serialize;

/// The data set, for people and programs. It depends only on the inputs and options.
#[derive(Debug, Serialize)]
pub struct Summary {
    /// The version of this file and of the folder's layout.
    pub format_version: u32,
    /// The tokenizer of the tokens.
    pub tokenizer: TokenizerSummary,
    /// Number of documents. One that is divided between splits counts once.
    pub documents: u64,
    /// The training split.
    pub train: SplitSummary,
    /// The validation split.
    pub validation: SplitSummary,
    /// The inputs, as the user gave them.
    pub inputs: Vec<String>,
    /// The share of documents for validation, as the user gave it.
    pub validation_fraction: f64,
    /// Tokens of each shard except the last; of pairs the fewest.
    pub shard_tokens: usize,
    /// Whether documents are pairs: the chosen text is a document of a shard, and the rejected one the next. Each pair counts
    /// once in [`Self::documents`].
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub preferences: bool,
    /// Warnings about likely mistakes in the data.
    #[serde(skip)]
    pub warnings: Warnings,
}

/// The tokenizer of the tokens.
#[derive(Debug, Serialize)]
pub struct TokenizerSummary {
    /// `bytes` or `hugging-face`.
    pub kind: &'static str,
    /// CRC-32 of tokenizer.json.
    pub crc32: Option<u32>,
    /// One more than the largest token.
    pub vocab: usize,
    /// The token at the end of a text.
    pub end_of_text: Option<u32>,
}

/// A split of the data set.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SplitSummary {
    /// Documents that begin in it.
    pub documents: u64,
    /// Its tokens, including those that end documents.
    pub tokens: u64,
    /// Tokens that are never targets, such as those of a conversation that are not the assistant's.
    pub masked_tokens: u64,
    /// Bytes of the text that was encoded.
    pub text_bytes: u64,
    /// Its files. `data` refuses a folder with other ones.
    pub shards: Vec<ListedShard>,
}
