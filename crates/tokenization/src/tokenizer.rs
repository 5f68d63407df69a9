//! A tokenizer: Hugging Face's, or bytes.

use crate::error::TokenizerError;
use crate::hugging_face::HuggingFace;
#[cfg(feature = "hugging-face")]
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The files that belong to a tokenizer, in its folder; each but the first may be missing.
pub const TOKENIZER_FILES: [&str; 4] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
];

/// Text to tokens and back.
#[derive(Debug)]
pub struct Tokenizer {
    pub(crate) kind: Kind,
    /// Its `tokenizer.json`; none for bytes.
    file: Option<PathBuf>,
}

#[derive(Debug)]
pub(crate) enum Kind {
    Bytes,
    HuggingFace(HuggingFace),
}

impl Tokenizer {
    /// Each byte of the text is a token; the byte 0 ends a text.
    pub fn bytes() -> Tokenizer {
        Tokenizer {
            kind: Kind::Bytes,
            file: None,
        }
    }

    /// Opens a `tokenizer.json`, a folder that has one, or `bytes`.
    ///
    /// The end-of-text token is `eos_token` of `tokenizer_config.json` or `special_tokens_map.json` in the same folder,
    /// else a token of a usual name.
    ///
    /// # Errors
    /// Files that are missing, cannot be read, or are no tokenizer; every file without the feature `hugging-face`.
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
        Ok(Tokenizer {
            kind: Kind::HuggingFace(HuggingFace::open(&file)?),
            file: Some(file),
        })
    }

    /// The tokens of `text`, no special ones added.
    ///
    /// # Errors
    /// A text that has no tokens, with tokenizers that do not cover every text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        match &self.kind {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::HuggingFace(own) => own.encode(text),
        }
    }

    /// The tokens of a text to go on with: with the special ones that its `tokenizer.json` puts before it, which is where
    /// transformers looks, and without one that would end it.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        match &self.kind {
            Kind::Bytes => self.encode(text),
            Kind::HuggingFace(own) => own.encode_prompt(text),
        }
    }

    /// The tokens of `text`, and the bytes of it that each stands for.
    #[cfg(feature = "hugging-face")]
    pub(crate) fn encode_with_offsets(
        &self,
        text: &str,
    ) -> Result<Vec<(u32, Range<usize>)>, TokenizerError> {
        match &self.kind {
            Kind::Bytes => {
                let bytes = text.bytes().enumerate();
                Ok(bytes.map(|(at, byte)| (byte.into(), at..at + 1)).collect())
            }
            Kind::HuggingFace(own) => own.encode_with_offsets(text),
        }
    }

    /// The last place in `text` where it may be cut: its two sides have the tokens of the whole, whatever comes after.
    /// None where there is none, or where it cannot be known of this tokenizer.
    pub fn safe_cut(&self, text: &str) -> Option<usize> {
        match &self.kind {
            Kind::Bytes => Some(text.len()).filter(|cut| *cut > 0),
            Kind::HuggingFace(own) => own.safe_cut(text),
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
            Kind::HuggingFace(own) => own.decode(tokens),
        }
    }

    /// One more than the largest token.
    pub fn vocab_size(&self) -> usize {
        match &self.kind {
            Kind::Bytes => 256,
            Kind::HuggingFace(own) => own.vocab_size(),
        }
    }

    /// The token that ends a text.
    pub fn end_of_text(&self) -> Option<u32> {
        match &self.kind {
            Kind::Bytes => Some(0),
            Kind::HuggingFace(own) => own.end_of_text(),
        }
    }

    /// Whether the last of some tokens of a text that is no white space may end an answer.
    #[cfg(feature = "hugging-face")]
    pub(crate) fn ends_in_stop<'a>(
        &self,
        text: &str,
        tokens: impl DoubleEndedIterator<Item = &'a (u32, Range<usize>)>,
    ) -> bool {
        let is_blank = |bytes: &Range<usize>| text[bytes.clone()].trim().is_empty();
        let last = tokens.rev().find(|(_, bytes)| !is_blank(bytes));
        last.is_some_and(|(token, _)| self.stops(*token))
    }

    /// Whether a token may end an answer: the one that ends a text, or another special one.
    #[cfg(feature = "hugging-face")]
    fn stops(&self, token: u32) -> bool {
        match &self.kind {
            Kind::HuggingFace(own) if own.is_special(token) => true,
            _ => self.end_of_text() == Some(token),
        }
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
