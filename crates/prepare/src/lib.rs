//! Makes shards of tokens from text, conversations, instructions and parquet: the folder that `--data` reads.
//!
//! Documents are read in the order of the inputs, encoded on several threads, and written in the same order. So the
//! same inputs give the same files for any number of threads. Memory holds two batches of documents, the longest
//! document that may not be cut, and the tokens of up to 131,072 words for each thread, but never all of the inputs.
//! The folder gets its name once everything in it is on the disk.
//!
//! Read on at [`prepare`], [`Options`], and [`PrepareError`] for the errors of inputs.

mod encode;
mod error;
mod inputs;
mod item;
mod items;
mod json_lines;
mod json_list;
mod open_document;
mod parquet_rows;
mod pipeline;
mod record_room;
mod records;
mod shards;
mod split;
mod summary;
mod text_pieces;
mod unfinished;
mod warnings;

pub use error::{PrepareError, Result};
pub use pipeline::{Options, Progress, prepare};
pub use summary::{SplitSummary, Summary};
pub use tokenization::{Teaching, Turns};
pub use warnings::Warnings;
