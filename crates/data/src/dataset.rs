//! Opening data: which source a path and a format mean, and whether it can give samples at all.

use std::path::Path;

use crate::{
    Batches, DEFAULT_SEQ, DataError, Format, MicroBatch, Options,
    batch_file::BatchFile,
    file::DataFile,
    llmc,
    order::Order,
    tokens::{TokenFile, Width},
};

/// A data source that was opened and found able to give samples.
///
/// - Built-in text (no path) and text files: each byte is a token, vocabulary 256.
/// - Token files: llm.c's layout, its Llama-3 variant, and bare u16. Sample `i` is the `seq + 1`
///   tokens from `i * seq`, so there are `(tokens - 1) / seq` samples.
/// - Batch files: safetensors with `input_ids` and `targets`, i32 or i64 `[N, seq]`, a sample a
///   row, target [`MASKED`](crate::MASKED) for no target.
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
    Tokens(TokenFile, Format),
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
        let source = Source::open(options.path.as_deref(), options.format)?;
        let (seq, samples) = match &source {
            Source::Tokens(tokens, _) => {
                let seq = options.seq.unwrap_or(DEFAULT_SEQ);
                (seq, tokens.samples(seq)?)
            }
            Source::Batches(batches) => {
                if let Some(wanted) = options.seq.filter(|&seq| seq != batches.seq) {
                    return Err(DataError::SeqDiffers {
                        file: batches.file.name.clone(),
                        found: batches.seq,
                        wanted,
                    });
                }
                (batches.seq, batches.rows)
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

    /// Tokens in a sequence.
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
            Source::Tokens(tokens, format) => {
                let kind = match (format, tokens.width) {
                    (Format::LlmC, Width::U32) => "llm.c u32 tokens",
                    (Format::LlmC, _) => "llm.c u16 tokens",
                    (Format::U16, _) => "u16 tokens",
                    _ => "bytes of text",
                };
                let count = tokens.tokens;
                format!("{name}: {count} {kind}, {samples} samples of {seq}")
            }
            Source::Batches(_) => format!("{name}: {samples} rows of {seq} tokens"),
        }
    }

    /// The steps of this dataset, from the beginning.
    pub fn batches(self) -> Batches {
        Batches::new(self)
    }

    /// The name to use in messages: the path, or what stands for it.
    pub(crate) fn name(&self) -> &str {
        match &self.source {
            Source::Tokens(tokens, _) => &tokens.file.name,
            Source::Batches(batches) => &batches.file.name,
        }
    }

    pub(crate) fn order(&self) -> Order {
        if self.options.shuffle {
            Order::shuffled(self.options.seed, self.samples as u64)
        } else {
            Order::File
        }
    }

    /// Appends a sample (below [`Self::samples`]) as one row.
    pub(crate) fn read_sample(
        &self,
        sample: usize,
        into: &mut MicroBatch,
    ) -> Result<(), DataError> {
        let vocab = self.options.vocab;
        match &self.source {
            Source::Tokens(tokens, _) => tokens.read_sample(sample, vocab, into),
            Source::Batches(batches) => batches.read_row(sample, vocab, into),
        }
    }
}

impl Source {
    fn open(path: Option<&Path>, format: Format) -> Result<Self, DataError> {
        let Some(path) = path else {
            return match format {
                Format::Auto | Format::Text => {
                    let tokens = TokenFile::text(DataFile::builtin());
                    Ok(Self::Tokens(tokens, Format::Text))
                }
                _ => Err(DataError::FormatNeedsPath {
                    format: format.name(),
                }),
            };
        };
        let file = DataFile::open(path)?;
        let format = match format {
            Format::Auto => format_of(path),
            stated => stated,
        };
        Ok(match format {
            Format::Auto | Format::Text => Self::Tokens(TokenFile::text(file), Format::Text),
            Format::U16 => Self::Tokens(TokenFile::bare_u16(file)?, format),
            Format::LlmC => Self::Tokens(llmc::open(file)?, format),
            Format::Batches => Self::Batches(BatchFile::open(file)?),
        })
    }
}

/// What `auto` means for a file of this name.
fn format_of(path: &Path) -> Format {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("safetensors") => Format::Batches,
        Some("bin") => Format::LlmC,
        _ => Format::Text,
    }
}
