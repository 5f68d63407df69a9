//! Files that are one long sequence of tokens: text, bare u16, llm.c.

use std::{ops::Range, path::Path};

use crate::{
    DataError, MASKED, MicroBatch, Result, ShardIndex, batch::token_id, checksums::Verified,
    file::DataFile, fingerprint::add_file,
};

/// Bytes of a token in its file, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    U8 = 1,
    U16 = 2,
    U32 = 4,
}

/// A file in which `bytes[start..]` are `tokens` tokens of `width`.
#[derive(Debug)]
pub(crate) struct TokenFile {
    pub(crate) file: DataFile,
    pub(crate) start: usize,
    pub(crate) width: Width,
    pub(crate) tokens: usize,
    pub(crate) index: Option<ShardIndex>,
    index_checksum: u32,
    blocks: Option<Verified>,
}

impl TokenFile {
    /// A file without an index.
    pub(crate) fn new(file: DataFile, start: usize, width: Width) -> Self {
        Self {
            tokens: (file.len() - start) / width as usize,
            file,
            start,
            width,
            index: None,
            index_checksum: 0,
            blocks: None,
        }
    }

    /// Text: each byte is a token.
    pub(crate) fn text(file: DataFile) -> Self {
        Self::new(file, 0, Width::U8)
    }

    /// nanoGPT's layout: u16 tokens and nothing else.
    pub(crate) fn bare_u16(file: DataFile) -> Result<Self> {
        let bytes = file.len();
        if !bytes.is_multiple_of(2) {
            return Err(DataError::Unusable(format!(
                "data file {} holds {bytes} bytes, an odd number, so its last u16 token is cut in half; copy or write it again, or \
                 check data.format",
                file.name
            )));
        }
        Ok(Self::new(file, 0, Width::U16))
    }

    /// Reads the index at `path`, and refuses it if it belongs to another file.
    pub(crate) fn with_index(mut self, path: &Path) -> Result<Self> {
        let (mut index, checksum) = ShardIndex::open_with_checksum(path)?;
        let bad = |reason| DataError::BadIndex {
            file: path.display().to_string(),
            reason,
        };
        let (shard, tokens) = (&self.file.name, self.tokens);
        if index.tokens != tokens as u64 {
            let described = index.tokens;
            return Err(bad(format!(
                "describes {described} tokens, but {shard} holds {tokens}: it belongs to another file"
            )));
        }
        let (held, wanted) = (
            index.checksums.len(),
            self.file.len().div_ceil(ShardIndex::BLOCK_BYTES),
        );
        if held != wanted {
            return Err(bad(format!(
                "has {held} checksums, but {shard} has {wanted} blocks: it belongs to another file"
            )));
        }
        self.blocks = Some(Verified::new(std::mem::take(&mut index.checksums)));
        self.index = Some(index);
        self.index_checksum = checksum;
        Ok(self)
    }

    /// Number of samples of `seq` inputs, with a shorter last one if `tails` count.
    pub(crate) fn samples(&self, seq: usize, tails: bool) -> usize {
        let inputs = self.tokens.saturating_sub(1);
        match tails {
            true => inputs.div_ceil(seq),
            false => inputs / seq,
        }
    }

    /// Inputs of the sample that begins at the token `first`: `seq`, and fewer in a tail.
    pub(crate) fn inputs(&self, first: usize, seq: usize) -> usize {
        seq.min(self.tokens - 1 - first)
    }

    /// Adds what distinguishes this file: the checksum of its index, or bytes at some places if it has none.
    pub(crate) fn fingerprint(&self, crc: &mut crc32fast::Hasher) {
        match self.index {
            Some(_) => crc.update(&self.index_checksum.to_le_bytes()),
            None => add_file(&self.file, crc),
        }
    }

    /// Appends `inputs` tokens from `first` on, each with the next token as its target.
    ///
    /// The caller keeps `first + inputs` below [`Self::tokens`], and `inputs` above 0.
    pub(crate) fn read(
        &self,
        first: usize,
        inputs: usize,
        vocab: usize,
        into: &mut MicroBatch,
    ) -> Result {
        let last = first + inputs;
        if let Some(blocks) = &self.blocks {
            let byte = |token: usize| self.start + token * self.width as usize;
            blocks.check(&self.file, byte(first)..byte(last + 1))?;
        }
        let targets = into.targets.len();
        for position in first..=last {
            let token = self.token(position);
            let id = token_id(i64::from(token), vocab).ok_or_else(|| {
                DataError::Unusable(format!(
                    "data file {}: token {token} at position {position} is outside the vocabulary of {vocab}; raise model.vocab, or \
                     use data made with this model's tokenizer",
                    self.file.name
                ))
            })?;
            if position < last {
                into.input_ids.push(id);
            }
            if position > first {
                into.targets.push(id);
            }
        }
        self.mask(first + 1, &mut into.targets[targets..]);
        Ok(())
    }

    /// Masks the targets, from token `first` on, that the index masks.
    fn mask(&self, first: usize, targets: &mut [i32]) {
        for masked in self.masked(first..first + targets.len()) {
            targets[masked.start - first..masked.end - first].fill(MASKED);
        }
    }

    /// Number of targets among the next tokens of `inputs` tokens from `first` on.
    pub(crate) fn targets(&self, first: usize, inputs: usize) -> usize {
        let masked = self.masked(first + 1..first + 1 + inputs);
        inputs - masked.map(|range| range.len()).sum::<usize>()
    }

    /// The ranges of `tokens` that the index masks.
    fn masked(&self, tokens: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let masked = self.index.as_ref().map_or(&[][..], |index| &index.masked);
        let (start, end) = (tokens.start as u64, tokens.end as u64);
        let from = masked.partition_point(|range| range.end <= start);
        let within = masked[from..]
            .iter()
            .take_while(move |range| range.start < end);
        within.map(move |range| range.start.max(start) as usize..range.end.min(end) as usize)
    }

    fn token(&self, position: usize) -> u32 {
        let at = self.start + position * self.width as usize;
        let bytes = &self.file[at..];
        match self.width {
            Width::U8 => u32::from(bytes[0]),
            Width::U16 => u32::from(u16::from_le_bytes([bytes[0], bytes[1]])),
            Width::U32 => u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        }
    }
}
