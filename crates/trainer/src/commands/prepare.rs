//! The `prepare` command: makes token files of text. Without the feature `text` it is refused.

#[cfg(feature = "text")]
mod writing;

#[cfg(feature = "text")]
pub(crate) use writing::prepare;

use clap::Args;
use std::path::PathBuf;

/// Flags of `prepare`.
#[derive(Debug, Args)]
pub struct PrepareArgs {
    /// Text (a document a file), JSONL or a list in JSON (`text`, `messages`, `conversations`, `prompt` and `completion`, `chosen`
    /// and `rejected`, or `instruction` and `output`), parquet, folders of these, or - for standard input; gzip and zstd are unpacked
    #[arg(required = true, value_name = "INPUT")]
    pub inputs: Vec<PathBuf>,
    /// Folder for the token files, which --data takes; new or empty
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// A tokenizer.json, a folder that has one (a model's), or `bytes`
    #[arg(long, value_name = "FILE|bytes")]
    pub tokenizer: PathBuf,
    /// Share of the documents that is kept for validation; of a single one, its end
    #[arg(
        long,
        value_name = "FRACTION",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub validation: f64,
    /// Tokens of each file
    #[arg(long, value_name = "N", default_value_t = 100_000_000)]
    pub shard_tokens: usize,
    /// Threads that encode; never changes the files [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
    /// Answers of a conversation that are learnt: all in one example, each in an example of its own, or the last alone [default: all,
    /// or each where the chat template writes turns differently once later ones come]
    #[arg(long, value_name = "all|each|last", value_parser = ["all", "each", "last"])]
    pub turns: Option<String>,
    /// Take answers that are empty, instead of refusing them
    #[arg(long)]
    pub allow_empty_answers: bool,
    /// No progress
    #[arg(long)]
    pub quiet: bool,
}

/// Says that this build lacks the feature, and how to build with it.
#[cfg(not(feature = "text"))]
pub(crate) fn prepare(_: &PrepareArgs) -> crate::failure::Result {
    Err(crate::Failure::NotBuilt {
        what: "`trainer prepare`",
        feature: "text",
    })
}
