//! Errors of preparing data, each with a sentence that says what to do.

use files::FilesError;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use tokenization::TokenizerError;

/// A result with a [`PrepareError`], unless another error is named.
pub type Result<T = (), E = PrepareError> = std::result::Result<T, E>;

/// Why no data set was made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum PrepareError {
    /// The share of documents for validation is out of range.
    #[error("--validation is {fraction}; it takes a number from 0 (none) to below 1")]
    Fraction { fraction: f64 },
    /// Shards are too small or too large: a shard's header counts in 31 bits.
    #[error("--shard-tokens is {tokens}; it takes 2 to {}", i32::MAX)]
    ShardTokens { tokens: usize },
    /// The output folder exists, and is not empty.
    #[error("{path} exists and is not an empty folder; give another --out, or remove it")]
    OutExists { path: PathBuf },
    /// Another command is making the same folder.
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
    /// An input does not exist.
    #[error("input {path} does not exist; give files, folders, or - for standard input")]
    Missing { path: PathBuf },
    /// An input has a weight, which is not allowed here.
    #[error(
        "input {path} does not exist, and `prepare` takes no weights: prepare each input into a folder of its own, and mix these \
         in training with --data DIR:WEIGHT for each"
    )]
    Weight { path: PathBuf },
    /// A file of a kind that has no documents.
    #[error(
        "{file} is {what}, which no documents are read from; leave it out, or make text in UTF-8, JSONL or parquet of it"
    )]
    NotText { file: String, what: &'static str },
    /// Parquet that is compressed or piped. Its end must be read before its beginning.
    #[error(
        "{file} is parquet that is compressed or piped, and parquet is read only from a plain file; unpack or save it, and give \
         that file"
    )]
    PackedParquet { file: String },
    /// The operating system could not read an input.
    #[error("cannot read {file}: {reason}")]
    Unreadable { file: String, reason: io::Error },
    /// Text that is not UTF-8.
    #[error(
        "{file} is not UTF-8 at byte {offset}; convert it (iconv -f ENCODING -t UTF-8), or leave it out"
    )]
    NotUtf8 { file: String, offset: u64 },
    /// A line or row that is not a document.
    #[error("{file}, {place}: {reason}")]
    BadDocument {
        file: String,
        place: String,
        reason: String,
    },
    /// A record for which there is too little memory.
    #[error(
        "{file}, {place}: it has more than {most} bytes, and is held in memory as a whole, with its tokens, for which the \
         {memory_bytes} bytes that this process may still take can be too few; make several records of it, or allow more memory"
    )]
    TooLong {
        file: String,
        place: String,
        most: u64,
        memory_bytes: u64,
    },
    /// A file that is not valid parquet.
    #[error("{file} cannot be read as parquet: {reason}")]
    BadParquet { file: String, reason: String },
    /// The inputs have no documents.
    #[error("the inputs hold no text")]
    NoDocuments,
    /// Some documents are pairs, and others are not.
    #[error(
        "some documents are pairs of a `chosen` and a `rejected` text, and others are not; prepare each kind into a folder of its \
         own"
    )]
    Mixed,
    /// Pairs take no `--turns each`.
    #[error(
        "--turns each makes an example of each answer, and each text of a pair is one example; take --turns all or last"
    )]
    EachOfPairs,
    /// A file could not be written.
    #[error("{0}; nothing was kept")]
    Unwritable(#[from] FilesError),
    /// The caller asked to stop.
    #[error("interrupted; nothing was kept")]
    Interrupted,
}

impl PrepareError {
    /// Whether the command was wrong rather than the data.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            PrepareError::Fraction { .. }
                | PrepareError::ShardTokens { .. }
                | PrepareError::OutExists { .. }
                | PrepareError::Busy { .. }
                | PrepareError::Weight { .. }
                | PrepareError::Threads { .. }
                | PrepareError::EachOfPairs
        )
    }

    /// Whether memory is short rather than the data wrong.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            PrepareError::TooLong { .. } => true,
            PrepareError::Unreadable { reason, .. } => reason.kind() == ErrorKind::OutOfMemory,
            PrepareError::Unwritable(error) => error.is_out_of_memory(),
            _ => false,
        }
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
