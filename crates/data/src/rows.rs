//! Makes rows of micro-batches from tokens.

use crate::Result;
use crate::{
    DataError, MicroBatch, Packing,
    document_parts::{DocumentPart, document_parts},
    first_fit::PackedRows,
    shards::TokenShards,
};

/// The samples of token files: each is a row.
#[derive(Debug)]
pub(crate) enum Rows {
    /// Sample `i` of a shard is the `seq + 1` tokens from `i * seq`, or what is left of them; no sample crosses shards. Has,
    /// for each shard, the number of samples up to its end.
    Concatenated(Vec<usize>),
    /// A row is one or more parts of documents.
    Packed(PackedRows),
    /// A row is the beginning of a document.
    Documents(Vec<DocumentPart>),
}

impl Rows {
    pub(crate) fn cut(
        shards: &TokenShards,
        packing: Packing,
        seq: usize,
        tails: bool,
    ) -> Result<Self> {
        Ok(match packing {
            Packing::Auto | Packing::Concatenate => Self::concatenated(shards, seq, tails)?,
            Packing::FirstFit => Self::Packed(PackedRows::first_fit(
                &document_parts(shards, packing, seq)?,
                seq,
            )),
            Packing::Pad => Self::Documents(document_parts(shards, packing, seq)?),
        })
    }

    fn concatenated(shards: &TokenShards, seq: usize, tails: bool) -> Result<Self> {
        let mut samples = 0;
        let ends = shards.files.iter().map(|file| {
            samples += file.samples(seq, tails);
            samples
        });
        let ends: Vec<usize> = ends.collect();
        if samples > 0 {
            return Ok(Self::Concatenated(ends));
        }
        let longest = shards
            .files
            .iter()
            .max_by_key(|file| file.tokens)
            .expect("there is a shard");
        Err(DataError::Unusable(format!(
            "data file {} holds {} tokens, but a sample of data.seq={seq} needs {}; lower data.seq or use a larger file",
            longest.file.name,
            longest.tokens,
            if tails { 2 } else { seq.saturating_add(1) }
        )))
    }

    pub(crate) fn samples(&self) -> usize {
        match self {
            Self::Concatenated(ends) => ends[ends.len() - 1],
            Self::Packed(rows) => rows.rows(),
            Self::Documents(parts) => parts.len(),
        }
    }

    /// Number of a sample's inputs that are not padding, in rows of `seq`.
    pub(crate) fn length(&self, shards: &TokenShards, sample: usize, seq: usize) -> usize {
        let inputs = |part: &DocumentPart| part.inputs as usize;
        match self {
            Self::Concatenated(ends) => {
                let (shard, first) = place(ends, sample, seq);
                shards.files[shard].inputs(first, seq)
            }
            Self::Packed(rows) => rows.row(sample).iter().map(inputs).sum(),
            Self::Documents(parts) => inputs(&parts[sample]),
        }
    }

    /// Number of a sample's targets, in rows of `seq`.
    pub(crate) fn targets(&self, shards: &TokenShards, sample: usize, seq: usize) -> usize {
        match self {
            Self::Concatenated(ends) => {
                let (shard, first) = place(ends, sample, seq);
                let file = &shards.files[shard];
                file.targets(first, file.inputs(first, seq))
            }
            Self::Packed(rows) => rows
                .row(sample)
                .iter()
                .map(|part| part.targets(shards))
                .sum(),
            Self::Documents(parts) => parts[sample].targets(shards),
        }
    }

    /// Appends a sample. [`MicroBatch::fill_row`] pads the rest of its row.
    pub(crate) fn read(
        &self,
        shards: &TokenShards,
        sample: usize,
        vocab: usize,
        into: &mut MicroBatch,
    ) -> Result {
        match self {
            Self::Concatenated(ends) => {
                let (shard, first) = place(ends, sample, into.seq);
                let file = &shards.files[shard];
                file.read(first, file.inputs(first, into.seq), vocab, into)
            }
            Self::Packed(rows) => {
                let mut parts = rows.row(sample).iter();
                parts.try_for_each(|part| part.read(shards, vocab, into))
            }
            Self::Documents(parts) => parts[sample].read(shards, vocab, into),
        }
    }

    /// The end of a line for people: the number of rows, and what they are made of.
    pub(crate) fn describe(&self, seq: usize) -> String {
        let samples = self.samples();
        match self {
            Self::Concatenated(_) => format!("{samples} samples of {seq}"),
            Self::Packed(rows) => {
                let filled = 100.0 * rows.filled(seq);
                format!("documents in {samples} rows of {seq}, {filled:.1} % filled")
            }
            Self::Documents(_) => format!("{samples} documents of at most {seq}"),
        }
    }
}

/// The shard of a concatenated sample, and the first of its tokens there.
fn place(ends: &[usize], sample: usize, seq: usize) -> (usize, usize) {
    let shard = ends.partition_point(|&end| end <= sample);
    let before = if shard == 0 { 0 } else { ends[shard - 1] };
    (shard, (sample - before) * seq)
}
