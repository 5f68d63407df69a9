//! What was made: `dataset.json`.

use data::ListedShard;
use serde::Serialize;

/// The data set, for people and for programs. It depends on the inputs and options alone.
#[derive(Debug, Serialize)]
pub struct Summary {
    /// Of this file and of the folder's layout.
    pub format_version: u32,
    /// What the tokens are of.
    pub tokenizer: TokenizerSummary,
    /// Documents; one that is split is one.
    pub documents: u64,
    /// The part to train on.
    pub train: SplitSummary,
    /// The part to validate with.
    pub validation: SplitSummary,
    /// The inputs, as they were given.
    pub inputs: Vec<String>,
    /// The share of documents for validation that was asked for.
    pub validation_fraction: f64,
    /// Tokens of each shard but the last.
    pub shard_tokens: usize,
}

/// What tokens are of.
#[derive(Debug, Serialize)]
pub struct TokenizerSummary {
    /// `bytes` or `hugging-face`.
    pub kind: &'static str,
    /// CRC-32 of tokenizer.json.
    pub crc32: Option<u32>,
    /// One more than the largest token.
    pub vocab: usize,
    /// What ends a text.
    pub end_of_text: Option<u32>,
}

/// A part of the data set.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SplitSummary {
    /// Documents that begin in it.
    pub documents: u64,
    /// Its tokens, those that end documents included.
    pub tokens: u64,
    /// Tokens that are never targets: of conversations, what the assistant did not say.
    pub masked_tokens: u64,
    /// Bytes of the text that its tokens stand for.
    pub text_bytes: u64,
    /// Its files; `data` refuses a folder that has others.
    pub shards: Vec<ListedShard>,
}
