//! Hugging Face's tokenizers: the library `tokenizers`, and what is faster than it for most texts.

use crate::cuts;
use crate::error::TokenizerError;
use crate::special_tokens::SpecialTokens;
use crate::words::Words;
use serde_json::{Map, Value};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Longer texts are encoded in pieces of about this many bytes, where that changes nothing: the library behind takes tens
/// of bytes of memory for each byte of a text.
const PIECE: usize = 16 << 10;

/// Names of end-of-text tokens, for tokenizers that configure none. A tokenizer has at most one of them.
const ENDS_OF_TEXT: [&str; 4] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"];

/// A tokenizer of the library's.
#[derive(Debug)]
pub(crate) struct HuggingFace {
    inner: Box<tokenizers::Tokenizer>,
    /// A faster way to split most texts, for tokenizers that we know.
    words: Option<Box<Words>>,
    end_of_text: Option<u32>,
    vocab_size: usize,
}

impl HuggingFace {
    /// Opens a `tokenizer.json`, with the end-of-text token that is configured in its folder.
    pub(crate) fn open(file: &Path) -> Result<HuggingFace, TokenizerError> {
        let malformed = |reason: String| TokenizerError::Malformed {
            path: file.into(),
            reason,
        };
        let contents = files::read_small(file).map_err(|reason| TokenizerError::Unreadable {
            path: file.into(),
            reason,
        })?;
        let json: Value =
            serde_json::from_slice(&contents).map_err(|error| malformed(error.to_string()))?;
        // The library takes some malformed tables for granted, and panics.
        let parsed = catch_unwind(|| tokenizers::Tokenizer::from_bytes(&contents));
        let parsed = parsed.map_err(|_| malformed("it is malformed".into()))?;
        let mut inner = parsed.map_err(|error| malformed(error.to_string()))?;
        // A saved tokenizer may have both from its last use.
        let untruncated = inner
            .with_truncation(None)
            .map(|inner| inner.with_padding(None));
        untruncated.map_err(|error| malformed(error.to_string()))?;
        let folder = file.parent().expect("a file has a folder").to_owned();
        let configured = Configuration::read(&folder)?.special;
        let words = Words::new(&json, inner.get_model());
        let mut ends = configured.get("eos_token").into_iter().chain(ENDS_OF_TEXT);
        Ok(HuggingFace {
            end_of_text: ends.find_map(|end| inner.token_to_id(end)),
            vocab_size: inner
                .get_vocab(true)
                .into_values()
                .max()
                .map_or(0, |last| last as usize + 1),
            inner: Box::new(inner),
            words: words.map(Box::new),
        })
    }

    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let inner = &self.inner;
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let mut rest = text;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(self.piece(rest));
            rest = after;
            if let Some(words) = &self.words
                && shielded(|| Ok(words.encode(inner.get_model(), piece, &mut tokens)))?
            {
                continue;
            }
            let encoding = shielded(|| inner.encode_fast(piece, false))?;
            tokens.extend_from_slice(encoding.get_ids());
        }
        Ok(tokens)
    }

    /// The tokens of a text to go on with, without one that would end it.
    pub(crate) fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let encoding = shielded(|| self.inner.encode(text, true))?;
        let mut tokens = encoding.get_ids().to_vec();
        let is_added = encoding.get_special_tokens_mask().last() == Some(&1);
        if is_added && tokens.len() > 1 && tokens.last() == self.end_of_text.as_ref() {
            tokens.pop();
        }
        Ok(tokens)
    }

    /// How much of `text` is encoded at once.
    fn piece(&self, text: &str) -> usize {
        if text.len() <= PIECE {
            return text.len();
        }
        let near = &text[..text.floor_char_boundary(PIECE)];
        self.safe_cut(near)
            .or_else(|| self.safe_cut(text))
            .unwrap_or(text.len())
    }

    pub(crate) fn safe_cut(&self, text: &str) -> Option<usize> {
        self.words.as_ref().and_then(|_| cuts::last(text))
    }

    pub(crate) fn decode(&self, tokens: &[u32]) -> String {
        self.inner.decode(tokens, true).unwrap_or_else(|_| {
            // A decoder that refuses them leaves the tokens' own names.
            tokens
                .iter()
                .filter_map(|token| self.inner.id_to_token(*token))
                .collect()
        })
    }

    pub(crate) fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The tokens of `text`, and the bytes of it that each stands for.
    pub(crate) fn encode_with_offsets(
        &self,
        text: &str,
    ) -> Result<Vec<(u32, Range<usize>)>, TokenizerError> {
        let encoding = shielded(|| self.inner.encode(text, false))?;
        let offsets = encoding.get_offsets().iter();
        let offsets = offsets.map(|(start, end)| *start..*end);
        Ok(encoding.get_ids().iter().copied().zip(offsets).collect())
    }

    /// Whether a token has a meaning of its own, and is no text.
    pub(crate) fn is_special(&self, token: u32) -> bool {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        added.get(&token).is_some_and(|token| token.special)
    }

    pub(crate) fn end_of_text(&self) -> Option<u32> {
        self.end_of_text
    }
}

/// Calls the library, for which some models that it reads are a reason to panic.
fn shielded<T>(encode: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, TokenizerError> {
    let result = catch_unwind(AssertUnwindSafe(encode));
    let result = result.unwrap_or_else(|_| Err("its tokenizer.json is malformed".into()));
    result.map_err(|error| TokenizerError::Encode {
        reason: error.to_string(),
    })
}

/// The settings in the files beside a `tokenizer.json`.
pub(crate) struct Configuration {
    pub(crate) special: SpecialTokens,
    pub(crate) chat_template: Value,
}

impl Configuration {
    pub(crate) fn read(folder: &Path) -> Result<Configuration, TokenizerError> {
        let mut configuration = read_object(&folder.join("tokenizer_config.json"))?;
        let mut special = SpecialTokens::default();
        special.add(&configuration);
        special.add(&read_object(&folder.join("special_tokens_map.json"))?);
        let chat_template = configuration.remove("chat_template").unwrap_or(Value::Null);
        Ok(Configuration {
            special,
            chat_template,
        })
    }
}

/// The object in a file; empty where there is no file.
fn read_object(path: &Path) -> Result<Map<String, Value>, TokenizerError> {
    match files::read_small(path) {
        Ok(contents) => {
            serde_json::from_slice(&contents).map_err(|error| TokenizerError::Malformed {
                path: path.into(),
                reason: error.to_string(),
            })
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Map::new()),
        Err(reason) => Err(TokenizerError::Unreadable {
            path: path.into(),
            reason,
        }),
    }
}
