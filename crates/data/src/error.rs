//! Errors of data, each with a sentence that says what to do.

use std::io;

use crate::{CutDocuments, FileKind};

/// A result with a [`DataError`], unless another error is named.
pub type Result<T = (), E = DataError> = std::result::Result<T, E>;

/// Why data cannot be opened, or a step cannot be read. Each message says what is wrong, where, and what to do. Most
/// reasons are a [`Setting`](Self::Setting) or [`Unusable`](Self::Unusable).
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum DataError {
    /// A size that must be at least 1 is 0.
    #[error("{key} is 0; set it to 1 or more")]
    Zero { key: &'static str },

    /// A setting that is invalid for this data, or for any.
    #[error("{0}")]
    Setting(String),

    /// The file does not exist.
    #[error("data file {file} does not exist; check data.path")]
    Missing { file: String },

    /// An index file that cannot be used.
    #[error(
        "index file {file} {reason}; write the data again with `trainer prepare`, \
         or remove all .idx files to read the shards without documents, masks and checksums"
    )]
    BadIndex { file: String, reason: String },

    /// A file that is neither text nor tokens.
    #[error("data file {file} is {}, neither text nor tokens{}", .kind.name(), way_out(*.kind))]
    NotText { file: String, kind: FileKind },

    /// Packing by documents, but the data has no documents.
    #[error(
        "data.packing is \"{packing}\", but {file} {reason}; \
         write the data with `trainer prepare`, or set data.packing=\"concatenate\""
    )]
    NoDocuments {
        file: String,
        packing: &'static str,
        reason: &'static str,
    },

    /// The operating system could not open or map the file.
    #[error("cannot read data file {file}: {reason}")]
    Unreadable { file: String, reason: io::Error },

    /// A token of a batch file outside the vocabulary.
    #[error(
        "data file {file}: `{tensor}` holds {token} at row {row}, column {column} (position {position}), \
         outside the vocabulary of {vocab}; raise model.vocab, or use data made with this model's tokenizer \
         (only a target may be negative, and only -100, for no target)"
    )]
    EntryOutOfRange {
        file: String,
        tensor: &'static str,
        token: i64,
        row: usize,
        column: usize,
        position: usize,
        vocab: usize,
    },

    /// A step without any target: its mean loss would be 0 / 0.
    #[error(
        "data file {file}: every target is masked in the step made of samples {samples} (epoch {epoch}); {}",
        more_targets(*cut)
    )]
    NoTargets {
        file: String,
        samples: String,
        epoch: u64,
        cut: CutDocuments,
    },

    /// A saved position that does not exist in this data.
    #[error(
        "cannot continue at sample {index} of epoch {epoch}: data file {file} gives {samples} samples an epoch; \
         resume with the data and data.seq that the run began with"
    )]
    NoSuchPosition {
        file: String,
        epoch: u64,
        index: u64,
        samples: u64,
    },

    /// Any other problem with a file or a folder.
    #[error("{0}")]
    Unusable(String),
}

/// Tells the user how a step gets targets.
fn more_targets(cut: CutDocuments) -> String {
    match cut.emptied {
        0 => "leave these samples out, or raise batch.micro, batch.accum or data.seq so that each step has a target".into(),
        emptied => format!(
            "{emptied} of {} documents or pairs are cut before a token that is learnt; raise --seq (data.seq), or leave them out",
            cut.documents
        ),
    }
}

/// Tells the user what to do with a file that is not text.
fn way_out(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Tokens => "; read it with data.format=\"llmc\"",
        FileKind::Other("safetensors") => {
            "; if it holds batches, read it with data.format=\"batches\""
        }
        FileKind::Other("text in UTF-16") => "; convert it to UTF-8",
        FileKind::Other(_) => "; give the text that it was made of, or that is in it",
        _ => ": `trainer prepare` makes tokens of it",
    }
}
