//! Everything that can go wrong while data is prepared, each with a sentence that says what to do.

use files::FilesError;
use std::io;
use std::path::{Path, PathBuf};
use tokenization::TokenizerError;

/// Why there is no data set.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum PrepareError {
    /// The share of documents for validation is no share.
    #[error("--validation is {fraction}; it takes a number from 0 (none) to below 1")]
    Fraction { fraction: f64 },
    /// A shard's header counts in 31 bits.
    #[error("--shard-tokens is {tokens}; it takes 2 to {}", i32::MAX)]
    ShardTokens { tokens: usize },
    /// There is something in the way.
    #[error("{path} exists and is not an empty folder; give another --out, or remove it")]
    OutExists { path: PathBuf },
    /// Another command makes the same.
    #[error(
        "another `trainer prepare` is writing {path}; wait until it is done, or give another --out"
    )]
    Busy { path: PathBuf },
    /// The tokenizer cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The worker threads did not start.
    #[error("the worker threads did not start: {reason}; give fewer --threads")]
    Threads { reason: String },
    /// There is no such input.
    #[error("input {path} does not exist; give files, folders, or - for standard input")]
    Missing { path: PathBuf },
    /// Inputs have no weights here.
    #[error(
        "input {path} does not exist, and `prepare` takes no weights: prepare each input into a folder of its own, and mix these \
         in training with --data DIR:WEIGHT for each"
    )]
    Weight { path: PathBuf },
    /// A file that holds no documents.
    #[error(
        "{file} is {what}, which no documents are read from; leave it out, or make text in UTF-8, JSONL or parquet of it"
    )]
    NotText { file: String, what: &'static str },
    /// Parquet whose end cannot be read before its beginning.
    #[error(
        "{file} is parquet that is compressed or piped, and parquet is read only from a plain file; unpack or save it, and give \
         that file"
    )]
    PackedParquet { file: String },
    /// The operating system would not read an input.
    #[error("cannot read {file}: {reason}")]
    Unreadable { file: String, reason: io::Error },
    /// Text in another encoding.
    #[error(
        "{file} is not UTF-8 at byte {offset}; convert it (iconv -f ENCODING -t UTF-8), or leave it out"
    )]
    NotUtf8 { file: String, offset: u64 },
    /// A line or row that is no document.
    #[error("{file}, {place}: {reason}")]
    BadDocument {
        file: String,
        place: String,
        reason: String,
    },
    /// A file that is not what its name says.
    #[error("{file} cannot be read as parquet: {reason}")]
    BadParquet { file: String, reason: String },
    /// Nothing to write.
    #[error("the inputs hold no text")]
    NoDocuments,
    /// A file could not be written.
    #[error("{0}; nothing was kept")]
    Unwritable(#[from] FilesError),
    /// The caller asked to stop.
    #[error("interrupted; nothing was kept")]
    Interrupted,
}

impl PrepareError {
    /// Whether the command was wrong, rather than the data.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            PrepareError::Fraction { .. }
                | PrepareError::ShardTokens { .. }
                | PrepareError::OutExists { .. }
                | PrepareError::Busy { .. }
                | PrepareError::Weight { .. }
                | PrepareError::Threads { .. }
        )
    }

    /// An input that could not be read.
    pub(crate) fn unreadable(file: &str) -> impl FnOnce(io::Error) -> PrepareError {
        move |reason| PrepareError::Unreadable {
            file: file.into(),
            reason,
        }
    }

    /// A file that could not be written.
    pub(crate) fn unwritable(path: &Path) -> impl FnOnce(io::Error) -> PrepareError {
        move |error| FilesError::at("write", path)(error).into()
    }
}
