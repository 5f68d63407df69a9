//! Opening data: which source a path and a format mean, and whether it can give samples at all.

use std::path::Path;

use crc32fast::Hasher;

use crate::{
    Batches, DEFAULT_SEQ, DataError, Format, MicroBatch, Options, Packing, batch_file::BatchFile,
    buckets::padded_lengths, file::DataFile, fingerprint::add_file, rows::Rows, shards::Shards,
};

/// A data source that was opened and found able to give samples.
///
/// - Built-in text (no path) and text files: each byte is a token, vocabulary 256.
/// - Token files: llm.c's layout, its Llama-3 variant, and bare u16; or a folder of them. An llm.c file may have a
///   [`ShardIndex`](crate::ShardIndex) beside it: then its blocks are compared with their checksums when they are first read, tokens that it
///   masks are never targets, and rows may follow its documents ([`Packing`]).
/// - Batch files: safetensors with `input_ids` and `targets`, i32 or i64 `[N, seq]`, a sample a
///   row, target [`MASKED`](crate::MASKED) for no target.
///
/// A sample is a row. With [`Packing::Concatenate`] sample `i` of a shard is the `seq + 1` tokens from `i * seq`, so it has
/// `(tokens - 1) / seq` samples; with the others rows follow documents, at 12 bytes of host memory for each piece of one.
///
/// Files are mapped, not read; tokens are checked against the vocabulary when they are taken.
#[derive(Debug)]
pub struct Dataset {
    source: Source,
    options: Options,
    seq: usize,
    samples: usize,
}

#[derive(Debug)]
enum Source {
    Tokens(Shards, Rows),
    Batches(BatchFile),
}

impl Dataset {
    /// Opens and checks the source that `options` describe.
    ///
    /// # Errors
    ///
    /// Whatever is wrong with the options or with the file's header and size, as a [`DataError`].
    pub fn open(options: &Options) -> Result<Self, DataError> {
        options.validate()?;
        let (source, seq, samples) = match open_tokens(options)? {
            Some(mut shards) => {
                let seq = options.seq.unwrap_or(DEFAULT_SEQ);
                let rows = Rows::cut(&shards, options.packing, seq)?;
                shards.forget_documents();
                let samples = rows.samples();
                (Source::Tokens(shards, rows), seq, samples)
            }
            None => {
                let batches = open_batches(options)?;
                let (seq, rows) = (batches.seq, batches.rows);
                (Source::Batches(batches), seq, rows)
            }
        };
        options.check_step_size(seq)?;
        let dataset = Self {
            source,
            options: options.clone(),
            seq,
            samples,
        };
        tracing::debug!("opened {}", dataset.describe());
        Ok(dataset)
    }

    /// Samples in an epoch; at least 1.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// Tokens in a sequence; the most of them with [`Packing::Pad`].
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// The options that it was opened with.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// One line for people: what the source is and how much it holds.
    pub fn describe(&self) -> String {
        let (name, seq, samples) = (self.name(), self.seq, self.samples);
        match &self.source {
            Source::Tokens(shards, rows) => {
                format!("{}, {}", shards.describe(), rows.describe(seq))
            }
            Source::Batches(_) => format!("{name}: {samples} rows of {seq} tokens"),
        }
    }

    /// Bytes of text that a token stands for on average, which makes bits per byte of a loss: 1 for text, and what their
    /// indices say for shards. `None` where nothing says.
    pub fn bytes_per_token(&self) -> Option<f64> {
        match &self.source {
            Source::Tokens(shards, _) => shards.bytes_per_token(),
            Source::Batches(_) => None,
        }
    }

    /// What tells this data from other data, whatever its files are called: their number, their size, and a checksum of
    /// indices, or of some places of files without one.
    pub fn fingerprint(&self) -> String {
        let mut crc = Hasher::new();
        let (files, bytes) = match &self.source {
            Source::Tokens(shards, _) => {
                shards
                    .files
                    .iter()
                    .for_each(|file| file.fingerprint(&mut crc));
                let bytes = shards.files.iter().map(|file| file.file.len()).sum();
                (shards.files.len(), bytes)
            }
            Source::Batches(batches) => {
                add_file(&batches.file, &mut crc);
                (1, batches.file.len())
            }
        };
        format!("files {files}, bytes {bytes}, crc32 {:08x}", crc.finalize())
    }

    /// The steps of this dataset, from the beginning.
    pub fn batches(self) -> Batches {
        Batches::new(self)
    }

    /// The name to use in messages: the path, or what stands for it.
    pub(crate) fn name(&self) -> &str {
        match &self.source {
            Source::Tokens(shards, _) => &shards.name,
            Source::Batches(batches) => &batches.file.name,
        }
    }

    /// Inputs of a sample (below [`Self::samples`]) that are not padding.
    pub(crate) fn length(&self, sample: usize) -> usize {
        match &self.source {
            Source::Tokens(_, rows) => rows.length(sample, self.seq),
            Source::Batches(batches) => batches.length(sample),
        }
    }

    /// Reads samples (below [`Self::samples`]) as the rows of a micro-batch.
    pub(crate) fn read(&self, samples: &[usize]) -> Result<MicroBatch, DataError> {
        let Options { packing, vocab, .. } = self.options;
        let seq = match packing {
            Packing::Pad => {
                let longest = samples.iter().map(|&sample| self.length(sample)).max();
                let longest = longest.unwrap_or(1).max(1);
                let mut lengths = padded_lengths(self.seq);
                lengths
                    .find(|&length| length >= longest)
                    .unwrap_or(self.seq)
            }
            _ => self.seq,
        };
        let mut batch = MicroBatch::with_room(samples.len(), seq, packing == Packing::FirstFit);
        for &sample in samples {
            match &self.source {
                Source::Tokens(shards, rows) => rows.read(shards, sample, vocab, &mut batch)?,
                Source::Batches(batches) => batches.read_row(sample, vocab, &mut batch)?,
            }
            batch.fill_row();
        }
        Ok(batch)
    }
}

/// Opens the source that `options` describe if it is one of tokens, `None` if it is one of batches.
fn open_tokens(options: &Options) -> Result<Option<Shards>, DataError> {
    let Some(path) = options.path.as_deref() else {
        return match options.format {
            Format::Auto | Format::Text => Ok(Some(Shards::builtin())),
            format => Err(DataError::FormatNeedsPath {
                format: format.name(),
            }),
        };
    };
    if path.is_dir() {
        return Shards::open_folder(path, options).map(Some);
    }
    match options.format {
        Format::Auto => match format_of(path) {
            Format::Batches => Ok(None),
            format => Shards::open_file(path, format).map(Some),
        },
        Format::Batches => Ok(None),
        format => Shards::open_file(path, format).map(Some),
    }
}

/// Opens a batch file, whose rows are as long as it says.
fn open_batches(options: &Options) -> Result<BatchFile, DataError> {
    let path = options.path.as_deref().expect("batches come from a file");
    let batches = BatchFile::open(DataFile::open(path)?)?;
    if let Some(wanted) = options.seq.filter(|&seq| seq != batches.seq) {
        return Err(DataError::SeqDiffers {
            file: batches.file.name,
            found: batches.seq,
            wanted,
        });
    }
    if options.packing == Packing::FirstFit {
        return Err(DataError::NoDocuments {
            file: batches.file.name,
            packing: options.packing.name(),
            reason: "is made of rows already",
        });
    }
    Ok(batches)
}

/// What `auto` means for a file of this name.
fn format_of(path: &Path) -> Format {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("safetensors") => Format::Batches,
        Some("bin") => Format::LlmC,
        _ => Format::Text,
    }
}
