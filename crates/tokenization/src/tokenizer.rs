//! A tokenizer: Hugging Face's, or bytes.

use crate::error::TokenizerError;
use crate::special_tokens::SpecialTokens;
use crate::words::Words;
use crate::{TextStream, cuts};
use serde_json::{Map, Value};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// The files that belong to a tokenizer, in its folder; each but the first may be missing.
pub const TOKENIZER_FILES: [&str; 4] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
];

/// Longer texts are encoded in pieces of about this many bytes, where that changes nothing: the library behind takes tens
/// of bytes of memory for each byte of a text.
const PIECE: usize = 16 << 10;

/// What a text without a configured end-of-text token ends with: the names in use, of which a tokenizer has one at most.
const ENDS_OF_TEXT: [&str; 4] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"];

/// Text to tokens and back.
#[derive(Debug)]
pub struct Tokenizer {
    kind: Kind,
    end_of_text: Option<u32>,
    vocab_size: usize,
    /// Its `tokenizer.json`; none for bytes.
    file: Option<PathBuf>,
}

#[derive(Debug)]
enum Kind {
    Bytes,
    /// The library's, and what is faster for most texts where the tokenizer is known.
    HuggingFace(Box<tokenizers::Tokenizer>, Option<Box<Words>>),
}

impl Tokenizer {
    /// Each byte of the text is a token; the byte 0 ends a text.
    pub fn bytes() -> Tokenizer {
        Tokenizer {
            kind: Kind::Bytes,
            end_of_text: Some(0),
            vocab_size: 256,
            file: None,
        }
    }

    /// Opens a `tokenizer.json`, a folder that has one, or `bytes`.
    ///
    /// The end-of-text token is `eos_token` of `tokenizer_config.json` or `special_tokens_map.json` in the same folder,
    /// else a token of a usual name.
    ///
    /// # Errors
    /// Files that are missing, cannot be read, or are no tokenizer.
    pub fn open(path: &Path) -> Result<Tokenizer, TokenizerError> {
        if path == Path::new("bytes") {
            return Ok(Tokenizer::bytes());
        }
        let file = if path.is_dir() {
            path.join("tokenizer.json")
        } else {
            path.into()
        };
        let file = std::path::absolute(&file).unwrap_or(file);
        if !file.is_file() {
            return Err(TokenizerError::Missing { path: path.into() });
        }
        let malformed = |reason: String| TokenizerError::Malformed {
            path: file.clone(),
            reason,
        };
        let contents = std::fs::read(&file).map_err(|reason| TokenizerError::Unreadable {
            path: file.clone(),
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
        Ok(Tokenizer {
            end_of_text: ends.find_map(|end| inner.token_to_id(end)),
            vocab_size: inner
                .get_vocab(true)
                .into_values()
                .max()
                .map_or(0, |last| last as usize + 1),
            kind: Kind::HuggingFace(Box::new(inner), words.map(Box::new)),
            file: Some(file),
        })
    }

    /// The tokens of `text`, no special ones added.
    ///
    /// # Errors
    /// A text that has no tokens, with tokenizers that do not cover every text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let Kind::HuggingFace(inner, words) = &self.kind else {
            return Ok(text.bytes().map(u32::from).collect());
        };
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let mut rest = text;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(self.piece(rest));
            rest = after;
            if let Some(words) = words
                && shielded(|| Ok(words.encode(inner.get_model(), piece, &mut tokens)))?
            {
                continue;
            }
            let encoding = shielded(|| inner.encode_fast(piece, false))?;
            tokens.extend_from_slice(encoding.get_ids());
        }
        Ok(tokens)
    }

    /// The tokens of a text to go on with: with the special ones that its `tokenizer.json` puts before it, which is where
    /// transformers looks, and without one that would end it.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let Kind::HuggingFace(inner, _) = &self.kind else {
            return self.encode(text);
        };
        let encoding = shielded(|| inner.encode(text, true))?;
        let mut tokens = encoding.get_ids().to_vec();
        let is_added = encoding.get_special_tokens_mask().last() == Some(&1);
        if is_added && tokens.len() > 1 && tokens.last() == self.end_of_text.as_ref() {
            tokens.pop();
        }
        Ok(tokens)
    }

    /// The tokens of `text`, and the bytes of it that each stands for.
    pub(crate) fn encode_with_offsets(
        &self,
        text: &str,
    ) -> Result<Vec<(u32, Range<usize>)>, TokenizerError> {
        let Kind::HuggingFace(inner, _) = &self.kind else {
            let bytes = text.bytes().enumerate();
            return Ok(bytes.map(|(at, byte)| (byte.into(), at..at + 1)).collect());
        };
        let encoding = shielded(|| inner.encode(text, false))?;
        let offsets = encoding
            .get_offsets()
            .iter()
            .map(|(start, end)| *start..*end);
        Ok(encoding.get_ids().iter().copied().zip(offsets).collect())
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

    /// The last place in `text` where it may be cut: its two sides have the tokens of the whole, whatever comes after.
    /// None where there is none, or where it cannot be known of this tokenizer.
    pub fn safe_cut(&self, text: &str) -> Option<usize> {
        match &self.kind {
            Kind::Bytes => Some(text.len()).filter(|cut| *cut > 0),
            Kind::HuggingFace(_, words) => words.as_ref().and_then(|_| cuts::last(text)),
        }
    }

    /// The text of `tokens`, without special ones; U+FFFD stands for bytes that are no text.
    pub fn decode(&self, tokens: &[u32]) -> String {
        match &self.kind {
            Kind::Bytes => {
                let bytes: Vec<u8> = tokens
                    .iter()
                    .filter_map(|token| u8::try_from(*token).ok())
                    .collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Kind::HuggingFace(inner, _) => inner.decode(tokens, true).unwrap_or_else(|_| {
                // A decoder that refuses them leaves the tokens' own names.
                tokens
                    .iter()
                    .filter_map(|token| inner.id_to_token(*token))
                    .collect()
            }),
        }
    }

    /// The text that `tokens` add to that of `prompt`. Decoded alone they may lack the space before their first word: some
    /// decoders drop it at the beginning of a text.
    pub fn decode_after(&self, prompt: &[u32], tokens: &[u32]) -> String {
        let mut stream = self.stream_after(prompt);
        let text: String = tokens.iter().map(|token| stream.push(*token)).collect();
        text + &stream.finish()
    }

    /// Decodes token by token what follows `prompt`, which may be empty.
    pub fn stream_after(&self, prompt: &[u32]) -> TextStream<'_> {
        TextStream::new(self, prompt)
    }

    /// One more than the largest token.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The token that ends a text.
    pub fn end_of_text(&self) -> Option<u32> {
        self.end_of_text
    }

    /// The folder of its files; none for bytes.
    pub fn folder(&self) -> Option<&Path> {
        self.file.as_deref().and_then(Path::parent)
    }

    /// The files that belong to it, each with the name that it should have; `tokenizer.json` is the first.
    pub fn files(&self) -> Vec<(PathBuf, &'static str)> {
        let Some(file) = &self.file else {
            return Vec::new();
        };
        let others = TOKENIZER_FILES[1..].iter();
        let others = others.map(|name| (file.with_file_name(name), *name));
        std::iter::once((file.clone(), TOKENIZER_FILES[0]))
            .chain(others.filter(|(path, _)| path.is_file()))
            .collect()
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

/// What is configured beside a `tokenizer.json`.
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
    match std::fs::read(path) {
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
