//! Batches of tokens on the host, in a reproducible order, from token files and folders of them,
//! text files and ready-made batches.
//!
//! This crate never touches device memory and never names a model: it knows a vocabulary's size, and returns plain
//! `Vec<i32>`. The same options give the same batches on every machine, for any number of threads.
//!
//! ```
//! use data::{Dataset, Format, Options, Packing, Split};
//!
//! let dataset = Dataset::open(&Options {
//!     path: None, // the text that ships in the binary
//!     format: Format::Auto,
//!     seq: Some(64),
//!     micro_batch: 4,
//!     accum: 2,
//!     shuffle: true,
//!     seed: 42,
//!     vocab: 256,
//!     packing: Packing::Concatenate,
//!     pairs: false,
//!     split: Split::Train,
//!     tails: false,
//! })?;
//! println!("{}", dataset.describe());
//!
//! let mut steps = data::prefetch(dataset.batches(), 2);
//! let step = steps.next_step()?;
//! assert_eq!(step.micro.len(), 2);
//! assert_eq!(step.target_count(), 2 * 4 * 64);
//! # Ok::<(), data::DataError>(())
//! ```
//!
//! Read on at [`Dataset`] for what can be opened, [`ShardIndex`] for the index beside a shard, [`ShardWriter`] for
//! writing shards, [`Packing`] for how documents become rows, [`Inputs`] for several inputs, [`FileKind`] for files
//! that are not text, [`Batches`] for how samples become steps, [`Position`] for saving and restoring, [`prefetch`] for
//! reading ahead, and [`DataError`] for errors.

mod auto_packing;
mod batch;
mod batch_file;
mod batches;
mod buckets;
mod builtin;
mod checksums;
mod cut_documents;
mod dataset;
mod document_parts;
mod error;
mod file;
mod file_kind;
mod fingerprint;
mod first_fit;
mod index_file;
mod inputs;
mod listing;
mod llmc;
mod mix;
mod once;
mod options;
mod order;
mod prefetch;
mod rows;
mod sample_order;
mod shard_writer;
mod shards;
mod source;
mod tokens;

pub use batch::{BesideTargets, MASKED, MicroBatch, PolicyTargets, StepBatch};
pub use batches::Batches;
pub use buckets::padded_lengths;
pub use cut_documents::CutDocuments;
pub use dataset::Dataset;
pub use error::{DataError, Result};
pub use file_kind::{BYTE_ORDER_MARK, FileKind};
pub use index_file::ShardIndex;
pub use inputs::{Input, Inputs, InputsError};
pub use listing::{ListedOrigin, ListedShard, ListedTokenizer};
pub use options::{DEFAULT_SEQ, Format, Options, Packing, Split};
pub use order::Position;
pub use prefetch::{Prefetched, prefetch};
pub use shard_writer::ShardWriter;
pub use source::TokensOf;
