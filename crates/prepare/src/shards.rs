//! Writes token files with a fixed number of tokens, each with its index.

use crate::Result;
use crate::encode::Encoded;
use crate::summary::SplitSummary;
use data::{ListedShard, ShardWriter};
use std::path::{Path, PathBuf};

/// The shards of a split: `NAME-00000.bin`, `NAME-00000.idx`, and so on.
pub(crate) struct Shards {
    folder: PathBuf,
    name: &'static str,
    vocab: usize,
    /// Tokens of each shard except the last; of pairs, which no shard divides, the fewest.
    capacity: u64,
    /// Whether documents are pairs.
    pub(crate) pairs: bool,
    open: Option<ShardWriter>,
    /// Whether a document starts with the next token.
    starts: bool,
    pub(crate) total: SplitSummary,
}

impl Shards {
    pub(crate) fn new(folder: &Path, name: &'static str, vocab: usize, capacity: u64) -> Shards {
        Shards {
            folder: folder.into(),
            name,
            vocab,
            capacity,
            pairs: false,
            open: None,
            starts: false,
            total: SplitSummary::default(),
        }
    }

    /// Appends tokens. Each shard gets bytes of text in proportion to its tokens.
    pub(crate) fn push(&mut self, encoded: &Encoded) -> Result {
        self.starts |= encoded.starts;
        let is_full = |shard: &mut ShardWriter| shard.tokens() >= self.capacity;
        if encoded.starts
            && let Some(full) = self.open.take_if(is_full)
        {
            self.finish(full)?;
        }
        let tokens = &encoded.tokens;
        let share = |tokens_before: usize| {
            let text = u128::from(encoded.text_bytes) * tokens_before as u128;
            (text / tokens.len() as u128) as u64
        };
        let mut at = 0;
        while at < tokens.len() {
            let mut shard = match self.open.take() {
                Some(shard) => shard,
                None => ShardWriter::create(&self.folder, &self.stem(), self.vocab)?,
            };
            let free = match self.pairs {
                true => usize::MAX,
                false => usize::try_from(self.capacity - shard.tokens()).unwrap_or(usize::MAX),
            };
            let mut end = tokens.len().min(at.saturating_add(free));
            for &begins in &encoded.further {
                self.starts |= at as u64 == begins;
                if (at as u64) < begins {
                    end = end.min(begins as usize);
                }
            }
            if std::mem::take(&mut self.starts) {
                shard.start_document();
            }
            let within = |token: u64| token.clamp(at as u64, end as u64) - at as u64;
            let masked = encoded.masked.iter();
            let masked = masked.map(|range| within(range.start)..within(range.end));
            shard.push(&tokens[at..end], masked, share(end) - share(at))?;
            at = end;
            match shard.tokens() == self.capacity && !self.pairs {
                true => self.finish(shard)?,
                false => self.open = Some(shard),
            }
        }
        Ok(())
    }

    /// Finishes the last shard.
    pub(crate) fn close(&mut self) -> Result {
        self.open.take().map_or(Ok(()), |shard| self.finish(shard))
    }

    /// Whether nothing was written.
    pub(crate) fn is_empty(&self) -> bool {
        self.total.shards.is_empty() && self.open.is_none()
    }

    /// The name of the next shard's files, without extension.
    fn stem(&self) -> String {
        format!("{}-{:05}", self.name, self.total.shards.len())
    }

    fn finish(&mut self, shard: ShardWriter) -> Result {
        let (name, index) = (format!("{}.bin", self.stem()), shard.finish()?);
        let tokens = index.tokens;
        let masked = index.masked.iter().map(|range| range.end - range.start);
        self.total.shards.push(ListedShard { name, tokens });
        self.total.documents += index.documents.len() as u64;
        self.total.tokens += tokens;
        self.total.masked_tokens += masked.sum::<u64>();
        self.total.text_bytes += index.text_bytes;
        Ok(())
    }
}
