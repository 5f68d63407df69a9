//! Opens one input, according to its path and format.

use std::path::Path;

use crc32fast::Hasher;

use crate::{
    CutDocuments, DEFAULT_SEQ, DataError, FileKind, Format, MicroBatch, Options, Packing, Result,
    batch_file::BatchFile, document_parts::cut_documents, file::DataFile, fingerprint::add_file,
    listing::ListedOrigin, rows::Rows, shards::TokenShards,
};

/// An open input.
#[derive(Debug)]
pub(crate) enum DataSource {
    Tokens(TokenShards, Rows, CutDocuments),
    Batches(BatchFile),
}

/// The meaning of an input's tokens.
#[derive(Debug, Clone, PartialEq)]
pub enum TokensOf {
    /// Each byte of a text is a token.
    Bytes,
    /// Text that `trainer prepare` encoded, with the tokenizer that its `dataset.json` names.
    Prepared(ListedOrigin),
    /// Not known, for files of bare tokens.
    Unknown,
}

impl DataSource {
    /// Opens the input that `path` and `options` describe; without a path the built-in text.
    pub(crate) fn open(path: Option<&Path>, options: &Options) -> Result<Self> {
        let source = match (open_tokens(path, options)?, path) {
            (Some(mut shards), _) => {
                shards.check_pairs(options.pairs)?;
                let seq = options.seq.unwrap_or(DEFAULT_SEQ);
                let rows = Rows::cut(&shards, options.packing, seq, options.tails)?;
                let cut = cut_documents(&shards, options, seq);
                shards.forget_documents();
                Self::Tokens(shards, rows, cut)
            }
            (None, Some(path)) => open_batches(path, options).map(Self::Batches)?,
            (None, None) => unreachable!("the built-in text has tokens"),
        };
        let rows = source.samples();
        if !rows.is_multiple_of(options.rows_together()) {
            return Err(DataError::Unusable(format!(
                "data {} has {rows} rows, and every two are to be a pair; write it with a rejected row after each chosen one",
                source.name()
            )));
        }
        Ok(source)
    }

    /// Tokens in a sequence.
    pub(crate) fn seq(&self, options: &Options) -> usize {
        match self {
            Self::Tokens(..) => options.seq.unwrap_or(DEFAULT_SEQ),
            Self::Batches(batches) => batches.seq,
        }
    }

    pub(crate) fn samples(&self) -> usize {
        match self {
            Self::Tokens(_, rows, _) => rows.samples(),
            Self::Batches(batches) => batches.rows,
        }
    }

    /// The name for messages: the path, or a text in its place.
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Tokens(shards, ..) => &shards.name,
            Self::Batches(batches) => &batches.file.name,
        }
    }

    pub(crate) fn describe(&self, seq: usize) -> String {
        match self {
            Self::Tokens(shards, rows, _) => {
                format!("{}, {}", shards.describe(), rows.describe(seq))
            }
            Self::Batches(batches) => {
                format!(
                    "{}: {} rows of {seq} tokens",
                    batches.file.name, batches.rows
                )
            }
        }
    }

    pub(crate) fn tokens_of(&self) -> TokensOf {
        match self {
            Self::Tokens(shards, ..) if shards.format == Format::Text => TokensOf::Bytes,
            Self::Tokens(shards, ..) => match &shards.origin {
                Some(origin) => TokensOf::Prepared(origin.clone()),
                None => TokensOf::Unknown,
            },
            Self::Batches(_) => TokensOf::Unknown,
        }
    }

    /// Bytes of text, and the number of their tokens, if both are known.
    pub(crate) fn text_and_tokens(&self) -> Option<(u64, u64)> {
        match self {
            Self::Tokens(shards, ..) => Some((shards.text_bytes()?, shards.tokens() as u64)),
            Self::Batches(_) => None,
        }
    }

    /// Adds to the checksum what distinguishes this data; returns the number of its files and bytes.
    pub(crate) fn fingerprint(&self, crc: &mut Hasher) -> (usize, usize) {
        match self {
            Self::Tokens(shards, ..) => {
                shards.files.iter().for_each(|file| file.fingerprint(crc));
                let bytes = shards.files.iter().map(|file| file.file.len()).sum();
                (shards.files.len(), bytes)
            }
            Self::Batches(batches) => {
                add_file(&batches.file, crc);
                (1, batches.file.len())
            }
        }
    }

    /// Number of inputs of a sample (below [`Self::samples`]) that are not padding.
    pub(crate) fn length(&self, sample: usize, seq: usize) -> usize {
        match self {
            Self::Tokens(shards, rows, _) => rows.length(shards, sample, seq),
            Self::Batches(batches) => batches.length(sample),
        }
    }

    /// Number of a sample's targets, by the index; none for batch files, which have to be read for it.
    pub(crate) fn targets(&self, sample: usize, seq: usize) -> Option<usize> {
        match self {
            Self::Tokens(shards, rows, _) => Some(rows.targets(shards, sample, seq)),
            Self::Batches(_) => None,
        }
    }

    /// Documents that are longer than a row.
    pub(crate) fn cut_documents(&self) -> CutDocuments {
        match self {
            Self::Tokens(_, _, cut) => *cut,
            Self::Batches(_) => CutDocuments::default(),
        }
    }

    /// Appends a sample to a micro-batch.
    pub(crate) fn read(&self, sample: usize, vocab: usize, into: &mut MicroBatch) -> Result {
        match self {
            Self::Tokens(shards, rows, _) => rows.read(shards, sample, vocab, into),
            Self::Batches(batches) => batches.read_row(sample, vocab, into),
        }
    }
}

/// Opens a source of tokens; `None` if it has batches.
fn open_tokens(path: Option<&Path>, options: &Options) -> Result<Option<TokenShards>> {
    let Some(path) = path else {
        return match options.format {
            Format::Auto | Format::Text => Ok(Some(TokenShards::builtin())),
            format => Err(DataError::Setting(format!(
                "data.format is \"{format}\" but data.path is not set, and the built-in data is text; set data.path, or leave \
                 data.format at \"auto\""
            ))),
        };
    };
    if path.is_dir() {
        return TokenShards::open_folder(path, options).map(Some);
    }
    let format = match options.format {
        Format::Auto => format_of(path)?,
        format => format,
    };
    match format {
        Format::Batches => Ok(None),
        format => TokenShards::open_file(path, format).map(Some),
    }
}

/// The format of a file for `auto`: by its name, or else by its first bytes.
pub(crate) fn format_of(path: &Path) -> Result<Format> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("safetensors") => Ok(Format::Batches),
        Some("bin") => Ok(Format::LlmC),
        _ => Ok(match FileKind::of(&DataFile::open(path)?) {
            FileKind::Tokens => Format::LlmC,
            _ => Format::Text,
        }),
    }
}

/// Opens a batch file, which sets the length of its rows.
fn open_batches(path: &Path, options: &Options) -> Result<BatchFile> {
    let batches = BatchFile::open(DataFile::open(path)?)?;
    if let Some(wanted) = options.seq.filter(|&seq| seq != batches.seq) {
        let (file, found) = (batches.file.name, batches.seq);
        return Err(DataError::Setting(format!(
            "data file {file} holds rows of {found} tokens, but data.seq={wanted}; leave data.seq unset, or set it to {found}"
        )));
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
