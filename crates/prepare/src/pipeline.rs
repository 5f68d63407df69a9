//! Reads, encodes on several threads, and writes, all at the same time.

use crate::PrepareError;
use crate::Result;
use crate::encode::{Encoded, Encoder};
use crate::inputs;
use crate::item::Item;
use crate::items::Items;
use crate::split::Splits;
use crate::summary::{Summary, TokenizerSummary};
use crate::unfinished::{Unfinished, check_free};
use data::ListedShard;
use files::{Disk, write_file};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use tokenization::{Teaching, Tokenizer};

/// Bytes of text that each thread encodes at a time.
const BATCH: usize = 2 << 20;

/// Options of [`prepare`].
#[derive(Clone, Debug)]
pub struct Options {
    /// Files, folders, or `-` for standard input.
    pub inputs: Vec<PathBuf>,
    /// The folder to make. It may exist if it is empty.
    pub out: PathBuf,
    /// A `tokenizer.json`, a folder with one, or `bytes`.
    pub tokenizer: PathBuf,
    /// The share of documents for validation, below 1.
    pub validation: f64,
    /// Tokens of each shard except the last.
    pub shard_tokens: usize,
    /// Number of threads that encode.
    pub threads: usize,
    /// What is learnt of conversations.
    pub teaching: Teaching,
    /// Host memory that may be taken; a record that could need more is refused.
    pub memory_bytes: u64,
}

/// Progress of [`prepare`].
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Bytes of input files read so far.
    pub bytes: u64,
    /// Bytes of all input files, without standard input.
    pub total: u64,
}

/// Writes the data set.
///
/// Calls `progress` regularly, which may interrupt the work. After any error, nothing is left at `out`.
///
/// # Errors
/// [`PrepareError`] with the input, the place in it, and the reason.
pub fn prepare(
    options: &Options,
    mut progress: impl FnMut(Progress) -> ControlFlow<()>,
) -> Result<Summary> {
    check(options)?;
    let inputs = inputs::find(&options.inputs)?;
    let encoder = Encoder::open(&options.tokenizer, options.teaching)?;
    let tokenizer = &encoder.tokenizer;
    let pool = threads(options.threads)?;
    let folder = Unfinished::create(&options.out)?;
    let (vocab, shard_tokens) = (tokenizer.vocab_size(), options.shard_tokens as u64);
    let mut splits = Splits::new(folder.path(), options.validation, vocab, shard_tokens);
    let items = Items::new(inputs, tokenizer, options.memory_bytes);
    write_all(items, &encoder, &pool, &mut splits, &mut progress)?;
    splits.finish()?;
    if splits.train.is_empty() {
        return Err(PrepareError::NoDocuments);
    }
    let crc32 = copy_tokenizer(tokenizer, folder.path())?;
    let summary = summarise(options, tokenizer, crc32, splits);
    write_summary(folder.path(), &summary)?;
    folder.publish()?;
    Ok(summary)
}

fn threads(number: usize) -> Result<ThreadPool> {
    let pool = ThreadPoolBuilder::new().num_threads(number).build();
    pool.map_err(|error| PrepareError::Threads {
        reason: error.to_string(),
    })
}

/// Encodes each batch on `pool`, while the previous one is written and the next one is read.
fn write_all(
    mut items: Items<'_>,
    encoder: &Encoder,
    pool: &ThreadPool,
    splits: &mut Splits,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result {
    let total = items.total;
    let mut encoded = Vec::new();
    let mut batch = items.batch(BATCH)?;
    while !batch.is_empty() {
        let (mut written, mut next) = (Ok(()), Ok(Vec::new()));
        let ready = std::mem::take(&mut encoded);
        pool.in_place_scope(|scope| {
            scope.spawn(|_| encoded = encode(encoder, batch));
            written = write(ready, splits);
            next = items.batch(BATCH * pool.current_num_threads());
        });
        written?;
        let bytes = items.bytes_read();
        if progress(Progress { bytes, total }).is_break() {
            return Err(PrepareError::Interrupted);
        }
        // An error in the previous batch is reported first.
        batch = match next {
            Ok(next) => next,
            Err(error) => {
                write(encoded, splits)?;
                return Err(error);
            }
        };
    }
    write(encoded, splits)
}

fn check(options: &Options) -> Result {
    let Options {
        validation,
        shard_tokens,
        out,
        ..
    } = options;
    if !(0.0..1.0).contains(validation) {
        return Err(PrepareError::Fraction {
            fraction: *validation,
        });
    }
    if !(2..=i32::MAX as usize).contains(shard_tokens) {
        return Err(PrepareError::ShardTokens {
            tokens: *shard_tokens,
        });
    }
    check_free(out)
}

fn encode(encoder: &Encoder, batch: Vec<Item>) -> Vec<Result<Option<Encoded>>> {
    let items = batch.into_par_iter();
    items.map(|item| encoder.encode(item)).collect()
}

/// Writes a batch in the order of the inputs, so that the first error is the same for any number of threads.
fn write(encoded: Vec<Result<Option<Encoded>>>, splits: &mut Splits) -> Result {
    for encoded in encoded {
        if let Some(encoded) = encoded? {
            splits.warnings.add(&encoded);
            splits.push(&encoded)?;
        }
    }
    Ok(())
}

/// Copies the tokenizer's files. Returns the CRC-32 of tokenizer.json.
fn copy_tokenizer(tokenizer: &Tokenizer, folder: &Path) -> Result<Option<u32>> {
    let mut crc32 = None;
    for (file, name) in tokenizer.files() {
        let contents =
            fs::read(&file).map_err(PrepareError::unreadable(&file.display().to_string()))?;
        let written = write_file(&Disk, folder, name, &contents)?;
        crc32 = crc32.or(Some(written.crc32));
    }
    Ok(crc32)
}

fn summarise(
    options: &Options,
    tokenizer: &Tokenizer,
    crc32: Option<u32>,
    splits: Splits,
) -> Summary {
    let kind = match crc32 {
        Some(_) => "hugging-face",
        None => "bytes",
    };
    let inputs = options.inputs.iter();
    Summary {
        format_version: ListedShard::FORMAT_VERSION,
        tokenizer: TokenizerSummary {
            kind,
            crc32,
            vocab: tokenizer.vocab_size(),
            end_of_text: tokenizer.end_of_text(),
        },
        documents: splits.documents,
        train: splits.train.total,
        validation: splits.validation.total,
        inputs: inputs.map(|input| input.display().to_string()).collect(),
        validation_fraction: options.validation,
        shard_tokens: options.shard_tokens,
        preferences: splits.pairs == Some(true),
        warnings: splits.warnings,
    }
}

fn write_summary(folder: &Path, summary: &Summary) -> Result {
    let mut json = serde_json::to_vec_pretty(summary).expect("numbers and texts");
    json.push(b'\n');
    write_file(&Disk, folder, ListedShard::FILE, &json)?;
    Ok(())
}
