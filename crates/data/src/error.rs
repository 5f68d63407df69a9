//! Everything that can be wrong with data, each with a sentence that says what to do.

use std::io;

use crate::FileKind;

/// Why there is no dataset, or no next step. Each message says what was wrong, where, and what to
/// do about it.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum DataError {
    /// A size that must be at least 1 is 0.
    #[error("{key} is 0; set it to 1 or more")]
    Zero { key: &'static str },

    /// Micro-batch, accumulation and sequence multiply to more than any step holds.
    #[error(
        "a step of {accum} micro-batches of {micro_batch} rows of {seq} tokens is more than {limit} tokens; \
         lower batch.accum, batch.micro or data.seq"
    )]
    StepTooLarge {
        micro_batch: usize,
        accum: usize,
        seq: usize,
        limit: usize,
    },

    /// A format other than text was asked for without a file.
    #[error(
        "data.format is \"{format}\" but data.path is not set, and the built-in data is text; \
         set data.path, or leave data.format at \"auto\""
    )]
    FormatNeedsPath { format: &'static str },

    /// A folder has nothing that is not trained on.
    #[error(
        "{folder} has no validation part to evaluate on; name other data with --eval-data, or prepare it with --validation"
    )]
    NoValidation { folder: String },

    /// Data of a tokenizer that has more tokens than the model.
    #[error(
        "{file}: this data was prepared with a tokenizer of {vocab} tokens, and the model knows {model}; raise model.vocab, or \
         prepare it with the model's own tokenizer"
    )]
    VocabTooSmall {
        file: String,
        vocab: usize,
        model: usize,
    },

    /// There is no such file.
    #[error("data file {file} does not exist; check data.path")]
    Missing { file: String },

    /// The path is a pipe or a device, or a shard's name is a folder's.
    #[error("data path {file} is not a file; set data.path to a file, or to a folder of shards")]
    NotAFile { file: String },

    /// A folder without shards.
    #[error(
        "data folder {folder} holds no .bin shards to train on (those named validation* or *_val_* are for evaluation); \
         set data.path to a folder that `trainer prepare` wrote, or to a file"
    )]
    NoShards { folder: String },

    /// A folder, and a format that folders do not have.
    #[error(
        "data.format is \"{format}\" but {folder} is a folder, whose .bin files are read as \"llmc\" or \"u16\"; \
         leave data.format at \"auto\", or set data.path to a file"
    )]
    FolderFormat {
        folder: String,
        format: &'static str,
    },

    /// Shards of u16 and of u32 in one folder.
    #[error(
        "data file {file} has tokens of {width} bytes, but {first} has tokens of {first_width}; \
         keep shards that were made together in a folder of their own"
    )]
    WidthsDiffer {
        file: String,
        width: usize,
        first: String,
        first_width: usize,
    },

    /// An index file that cannot be used.
    #[error(
        "index file {file} {reason}; write the data again with `trainer prepare`, \
         or remove all .idx files to read the shards without documents, masks and checksums"
    )]
    BadIndex { file: String, reason: String },

    /// A `dataset.json` that cannot be used, or lists other shards than are there.
    #[error(
        "{file} {reason}; copy the folder again, or write the data again with `trainer prepare`, \
         or remove that file to read the .bin files that are there"
    )]
    BadListing { file: String, reason: String },

    /// A file that is something else than text, or than the tokens that its name promises.
    #[error("data file {file} is {}, neither text nor tokens{}", .kind.name(), way_out(*.kind))]
    NotText { file: String, kind: FileKind },

    /// A shard without an index among shards that have one.
    #[error(
        "data file {file} has no .idx beside it, but {with} has; copy the folder again, or write the data again"
    )]
    IndexMissing { file: String, with: String },

    /// A block of a shard that is not what was written.
    #[error(
        "data file {file} is corrupt: the {bytes} bytes at offset {offset} have checksum {found:08x}, \
         but {expected:08x} was written; copy or write it again"
    )]
    Corrupt {
        file: String,
        offset: usize,
        bytes: usize,
        expected: u32,
        found: u32,
    },

    /// Packing by documents without documents.
    #[error(
        "data.packing is \"{packing}\", but {file} {reason}; \
         write the data with `trainer prepare`, or set data.packing=\"concatenate\""
    )]
    NoDocuments {
        file: String,
        packing: &'static str,
        reason: &'static str,
    },

    /// The operating system would not open or map the file.
    #[error("cannot read data file {file}: {reason}")]
    Unreadable { file: String, reason: io::Error },

    /// The file has no bytes.
    #[error("data file {file} is empty; write it again, or check data.path")]
    Empty { file: String },

    /// The file ends inside llm.c's header.
    #[error(
        "data file {file} holds {bytes} bytes, less than the {needed} of an llm.c header; \
         write it again, or set data.format=\"u16\" if it holds bare u16 tokens"
    )]
    HeaderTruncated {
        file: String,
        bytes: usize,
        needed: usize,
    },

    /// The file does not begin as an llm.c token file does.
    #[error(
        "data file {file} begins with magic {found}, which is not llm.c's (20240520, or 20240801 for u32 tokens); \
         if it holds bare u16 tokens, set data.format=\"u16\""
    )]
    WrongMagic { file: String, found: i32 },

    /// An llm.c token file of a version that is not known here.
    #[error(
        "data file {file} has magic {magic} and version {found}, but that magic is read in version {expected} only; \
         write it again in version {expected}"
    )]
    WrongVersion {
        file: String,
        magic: i32,
        found: i32,
        expected: i32,
    },

    /// Header and length of an llm.c token file disagree.
    #[error(
        "data file {file}: its header says {header} tokens of {width} bytes, but the file holds {held} \
         ({bytes} bytes after the header); it was cut short or changed, so copy or write it again"
    )]
    TokenCount {
        file: String,
        header: i32,
        held: usize,
        width: usize,
        bytes: usize,
    },

    /// A bare u16 file whose length is odd.
    #[error(
        "data file {file} holds {bytes} bytes, an odd number, so its last u16 token is cut in half; \
         copy or write it again, or check data.format"
    )]
    OddLength { file: String, bytes: usize },

    /// Not one sample of the wanted length.
    #[error(
        "data file {file} holds {tokens} tokens, but a sample of data.seq={seq} needs {needed}; \
         lower data.seq or use a larger file"
    )]
    TooShort {
        file: String,
        tokens: usize,
        seq: usize,
        needed: usize,
    },

    /// The file is not safetensors, or is cut short.
    #[error(
        "data file {file} is not a whole safetensors file: {reason}; \
         copy or write it again, or check data.format"
    )]
    NotSafetensors { file: String, reason: String },

    /// A batch file without one of its two tensors.
    #[error(
        "data file {file} has no tensor `{tensor}` (it holds: {found}); \
         a batch file needs `input_ids` and `targets`"
    )]
    MissingTensor {
        file: String,
        tensor: &'static str,
        found: String,
    },

    /// A batch tensor that is not made of integers.
    #[error(
        "data file {file}: tensor `{tensor}` is {found}; a batch file needs I32 or I64, so convert it"
    )]
    TensorDtype {
        file: String,
        tensor: &'static str,
        found: String,
    },

    /// A batch tensor that is not a matrix, or holds nothing.
    #[error(
        "data file {file}: tensor `{tensor}` has shape {found:?}; \
         a batch file needs [rows, seq], both 1 or more"
    )]
    TensorShape {
        file: String,
        tensor: &'static str,
        found: Vec<usize>,
    },

    /// The two batch tensors differ in shape.
    #[error(
        "data file {file}: `input_ids` has shape {input_ids:?} but `targets` has {targets:?}; \
         write them with one target for each input"
    )]
    ShapesDiffer {
        file: String,
        input_ids: Vec<usize>,
        targets: Vec<usize>,
    },

    /// A batch file brings its own sequence length, and it is not the one asked for.
    #[error(
        "data file {file} holds rows of {found} tokens, but data.seq={wanted}; \
         leave data.seq unset, or set it to {found}"
    )]
    SeqDiffers {
        file: String,
        found: usize,
        wanted: usize,
    },

    /// Inputs whose rows have several lengths: those of a batch file have their own.
    #[error(
        "data inputs {first} and {other} do not go together: rows of the one have {first_seq} tokens, of the other {other_seq}; \
         the rows of a batch file stay as long as they are, those of token files and text are as long as data.seq"
    )]
    SeqsDiffer {
        first: String,
        first_seq: usize,
        other: String,
        other_seq: usize,
    },

    /// A token of a token file outside the vocabulary.
    #[error(
        "data file {file}: token {token} at position {position} is outside the vocabulary of {vocab}; \
         raise model.vocab, or use data made with this model's tokenizer"
    )]
    TokenOutOfRange {
        file: String,
        token: u32,
        position: usize,
        vocab: usize,
    },

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

    /// A step in which nothing is to be learnt: its mean loss would be 0 / 0.
    #[error(
        "data file {file}: every target is masked in the step made of samples {samples} (epoch {epoch}); \
         remove them, or raise batch.micro or batch.accum so that each step has a target"
    )]
    NoTargets {
        file: String,
        samples: String,
        epoch: u64,
    },

    /// A saved position that this data does not have.
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

    /// The thread that reads ahead is gone.
    #[error("the thread that reads data ahead {reason}; run again, and report it if it recurs")]
    ReaderStopped { reason: String },
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
