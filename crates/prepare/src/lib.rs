//! Text, conversations, instructions and parquet to shards of tokens: the folder that `--data` reads.
//!
//! Documents are read in the order of the inputs, encoded on several threads, and written in that order again: the same
//! inputs give the same files, whatever the number of threads. Memory holds two batches of documents, the longest one that
//! may not be cut, and the tokens of up to 131,072 words a thread; never the inputs. The folder gets its name when everything in
//! it is on the disk.
//!
//! Where to read on: [`prepare`], [`Options`], and [`PrepareError`] for all that can be wrong with an input.

mod encode;
mod error;
mod held;
mod inputs;
mod item;
mod items;
mod json_lines;
mod json_list;
mod parquet_rows;
mod pipeline;
mod records;
mod shards;
mod split;
mod summary;
mod text_pieces;
mod unfinished;

pub use error::PrepareError;
pub use pipeline::{Options, Progress, prepare};
pub use summary::{SplitSummary, Summary};
