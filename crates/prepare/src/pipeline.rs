//! Reading, encoding on several threads, and writing, at the same time.

use crate::PrepareError;
use crate::encode::{Encoded, Encoder};
use crate::inputs;
use crate::items::{Item, Items};
use crate::shards::Width;
use crate::split::Splits;
use crate::summary::{Summary, TokenizerSummary};
use rayon::prelude::*;
use std::fs::{self, File};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use tokenization::{ChatTemplate, Tokenizer};

/// Bytes of text for each thread that are encoded at once.
const BATCH: usize = 2 << 20;

/// What to prepare, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// Files, folders, or `-` for standard input.
    pub inputs: Vec<PathBuf>,
    /// The folder to make; an empty one may be there.
    pub out: PathBuf,
    /// A `tokenizer.json`, a folder that has one, or `bytes`.
    pub tokenizer: PathBuf,
    /// The share of documents for validation, below 1.
    pub validation: f64,
    /// Tokens of each shard but the last.
    pub shard_tokens: usize,
    /// Threads that encode.
    pub threads: usize,
}

/// How far it is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Bytes of input files that were read.
    pub bytes: u64,
    /// Bytes of all input files, without standard input.
    pub total: u64,
}

/// Writes the data set.
///
/// `progress` is called now and then, and may break off. Whatever the reason for an error, nothing is left at `out`.
///
/// # Errors
/// [`PrepareError`] says which input, where, and why.
pub fn prepare(
    options: &Options,
    mut progress: impl FnMut(Progress) -> ControlFlow<()>,
) -> Result<Summary, PrepareError> {
    check(options)?;
    let inputs = inputs::find(&options.inputs)?;
    let total = inputs.iter().map(|input| input.bytes).sum();
    let tokenizer = Tokenizer::open(&options.tokenizer)?;
    let template = tokenizer.folder().map_or(Ok(None), ChatTemplate::open)?;
    let encoder = Encoder {
        tokenizer,
        template,
    };
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(options.threads)
        .build();
    let pool = pool.map_err(|error| PrepareError::Threads {
        reason: error.to_string(),
    })?;

    let folder = unfinished(&options.out)?;
    let width = Width::of(encoder.tokenizer.vocab_size());
    let mut splits = Splits::new(
        folder.path(),
        options.validation,
        width,
        options.shard_tokens as u64,
    );
    let mut items = Items::new(inputs, &encoder.tokenizer);
    let mut encoded = Vec::new();
    let mut batch = items.batch(BATCH)?;
    while !batch.is_empty() {
        let (mut written, mut next) = (Ok(()), Ok(Vec::new()));
        let ready = std::mem::take(&mut encoded);
        pool.in_place_scope(|scope| {
            scope.spawn(|_| encoded = encode(&encoder, batch));
            written = write(ready, &mut splits);
            next = items.batch(BATCH * options.threads);
        });
        written?;
        let bytes = items.bytes_read();
        if progress(Progress { bytes, total }).is_break() {
            return Err(PrepareError::Interrupted);
        }
        // An error of what was read before comes first.
        batch = match next {
            Ok(next) => next,
            Err(error) => {
                write(encoded, &mut splits)?;
                return Err(error);
            }
        };
    }
    write(encoded, &mut splits)?;
    splits.finish()?;
    if splits.train.is_empty() {
        return Err(PrepareError::NoDocuments);
    }
    let crc32 = copy_tokenizer(&encoder.tokenizer, folder.path())?;
    let summary = Summary {
        format_version: 1,
        tokenizer: TokenizerSummary {
            kind: if crc32.is_some() {
                "hugging-face"
            } else {
                "bytes"
            },
            crc32,
            vocab: encoder.tokenizer.vocab_size(),
            end_of_text: encoder.tokenizer.end_of_text(),
        },
        documents: splits.documents,
        train: splits.train.total,
        validation: splits.validation.total,
        inputs: options
            .inputs
            .iter()
            .map(|input| input.display().to_string())
            .collect(),
        validation_fraction: options.validation,
        shard_tokens: options.shard_tokens,
    };
    publish(folder, &options.out, &summary)?;
    Ok(summary)
}

fn check(options: &Options) -> Result<(), PrepareError> {
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
    let free = match fs::read_dir(out) {
        Ok(mut entries) => entries.next().is_none(),
        Err(_) => !out.exists(),
    };
    if free {
        Ok(())
    } else {
        Err(PrepareError::OutExists { path: out.clone() })
    }
}

fn encode(encoder: &Encoder, batch: Vec<Item>) -> Vec<Result<Option<Encoded>, PrepareError>> {
    let items = batch.into_par_iter();
    items.map(|item| encoder.encode(item)).collect()
}

/// In the order of the inputs, so that the first error is the same whatever the number of threads.
fn write(
    encoded: Vec<Result<Option<Encoded>, PrepareError>>,
    splits: &mut Splits,
) -> Result<(), PrepareError> {
    for encoded in encoded {
        if let Some(encoded) = encoded? {
            splits.push(&encoded)?;
        }
    }
    Ok(())
}

/// A hidden folder beside `out`, which goes unless it is published.
fn unfinished(out: &Path) -> Result<tempfile::TempDir, PrepareError> {
    let absolute = std::path::absolute(out).map_err(PrepareError::unwritable(out))?;
    let parent = absolute.parent().unwrap_or(&absolute);
    fs::create_dir_all(parent).map_err(PrepareError::unwritable(parent))?;
    let mut builder = tempfile::Builder::new();
    builder.prefix(".preparing-");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
    builder
        .tempdir_in(parent)
        .map_err(PrepareError::unwritable(parent))
}

/// Copies the tokenizer's files; the CRC-32 of tokenizer.json.
fn copy_tokenizer(tokenizer: &Tokenizer, folder: &Path) -> Result<Option<u32>, PrepareError> {
    let mut crc32 = None;
    for (file, name) in tokenizer.files() {
        let contents =
            fs::read(&file).map_err(PrepareError::unreadable(&file.display().to_string()))?;
        crc32 = crc32.or_else(|| Some(crc32fast::hash(&contents)));
        let copy = folder.join(name);
        fs::write(&copy, contents).map_err(PrepareError::unwritable(&copy))?;
    }
    Ok(crc32)
}

/// Writes `dataset.json`, and gives the folder its name.
fn publish(folder: tempfile::TempDir, out: &Path, summary: &Summary) -> Result<(), PrepareError> {
    let path = folder.path().join("dataset.json");
    let mut json = serde_json::to_vec_pretty(summary).expect("numbers and texts");
    json.push(b'\n');
    let written = File::create(&path).and_then(|mut file| {
        file.write_all(&json)?;
        file.sync_data()
    });
    written.map_err(PrepareError::unwritable(&path))?;
    fs::rename(folder.path(), out).map_err(PrepareError::unwritable(out))?;
    // Nothing is left there to be removed.
    let _ = folder.keep();
    Ok(())
}
