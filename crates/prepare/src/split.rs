//! Decides which documents are for validation.
//!
//! A document is for validation if a hash of its record's number is below the fraction; the first document never is. If the hash
//! selects none, the last document is for validation, or the last part of a single one. So until one is selected, each
//! document is held until the next one starts.

use crate::PrepareError;
use crate::Result;
use crate::encode::Encoded;
use crate::open_document::OpenDocument;
use crate::shards::Shards;
use crate::warnings::Warnings;
use std::path::{Path, PathBuf};

pub(crate) struct Splits {
    folder: PathBuf,
    fraction: f64,
    pub(crate) train: Shards,
    pub(crate) validation: Shards,
    /// Number of records started. All documents of a record are in the same split.
    records: u64,
    /// Number of documents started; a pair is one.
    pub(crate) documents: u64,
    /// Whether the current document is for validation.
    validates: bool,
    /// The current document, as long as none is for validation.
    held: Option<OpenDocument>,
    /// Whether documents are pairs; none before the first.
    pub(crate) pairs: Option<bool>,
    pub(crate) warnings: Warnings,
}

impl Splits {
    pub(crate) fn new(folder: &Path, fraction: f64, vocab: usize, shard_tokens: u64) -> Splits {
        Splits {
            folder: folder.into(),
            fraction,
            train: Shards::new(folder, "train", vocab, shard_tokens),
            validation: Shards::new(folder, "validation", vocab, shard_tokens),
            records: 0,
            documents: 0,
            validates: false,
            held: None,
            pairs: None,
            warnings: Warnings::default(),
        }
    }

    /// Takes the next piece of the current document, or the first piece of the next one.
    pub(crate) fn push(&mut self, encoded: &Encoded) -> Result {
        if encoded.starts {
            self.release()?;
            let is_pair = encoded.is_pair;
            if *self.pairs.get_or_insert(is_pair) != is_pair {
                return Err(PrepareError::Mixed);
            }
            (self.train.pairs, self.validation.pairs) = (is_pair, is_pair);
            self.validates = self.records > 0 && share(self.records) < self.fraction;
            self.records += 1;
            self.documents += match is_pair {
                true => 1,
                false => 1 + encoded.further.len() as u64,
            };
            let hold = self.fraction > 0.0 && !self.validates && self.validation.is_empty();
            self.held = hold.then(|| OpenDocument::new(&self.folder));
        }
        match &mut self.held {
            Some(held) => held.push(encoded),
            None if self.validates => self.validation.push(encoded),
            None => self.train.push(encoded),
        }
    }

    /// Writes a document that is still held, and finishes both splits.
    pub(crate) fn finish(&mut self) -> Result {
        if let Some(mut held) = self.held.take() {
            let tokens = held.tokens;
            let cut = match self.records {
                // At least one token on each side.
                1 if tokens > 1 && self.pairs == Some(false) => {
                    let last = (tokens as f64 * self.fraction).round() as u64;
                    tokens - last.clamp(1, tokens - 1)
                }
                1 => tokens,
                _ => 0,
            };
            held.write(0..cut, &mut self.train)?;
            held.write(cut..tokens, &mut self.validation)?;
        }
        self.train.close()?;
        self.validation.close()
    }

    /// Writes the held document to the training split, because another one follows.
    fn release(&mut self) -> Result {
        self.held.take().map_or(Ok(()), |mut held| {
            held.write(0..held.tokens, &mut self.train)
        })
    }
}

/// A number in [0, 1) that depends only on the document's number: the upper 53 bits of SplitMix64.
fn share(document: u64) -> f64 {
    let mut z = document.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    #[test]
    fn shares_are_spread() {
        for fraction in [0.01, 0.1, 0.5] {
            let taken = (0..100_000)
                .filter(|document| super::share(*document) < fraction)
                .count();
            let error = (taken as f64 / 100_000.0 - fraction).abs();
            assert!(error < 0.005, "{taken} for {fraction}");
        }
    }
}
