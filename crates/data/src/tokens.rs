//! Sources that are one long row of tokens: text, bare u16, llm.c.

use crate::{DataError, MicroBatch, batch::token_id, file::DataFile};

/// Bytes a token takes in its file; little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    U8 = 1,
    U16 = 2,
    U32 = 4,
}

/// A file of which `bytes[start..]` are `tokens` tokens of `width`.
#[derive(Debug)]
pub(crate) struct TokenFile {
    pub(crate) file: DataFile,
    pub(crate) start: usize,
    pub(crate) width: Width,
    pub(crate) tokens: usize,
}

impl TokenFile {
    /// Text: each byte is a token.
    pub(crate) fn text(file: DataFile) -> Self {
        Self {
            tokens: file.len(),
            file,
            start: 0,
            width: Width::U8,
        }
    }

    /// nanoGPT's layout: u16 tokens and nothing else.
    pub(crate) fn bare_u16(file: DataFile) -> Result<Self, DataError> {
        let bytes = file.len();
        if !bytes.is_multiple_of(2) {
            return Err(DataError::OddLength {
                file: file.name,
                bytes,
            });
        }
        Ok(Self {
            file,
            start: 0,
            width: Width::U16,
            tokens: bytes / 2,
        })
    }

    /// How many samples of `seq` inputs there are; an error where there is none.
    pub(crate) fn samples(&self, seq: usize) -> Result<usize, DataError> {
        match self.tokens.saturating_sub(1) / seq {
            0 => Err(DataError::TooShort {
                file: self.file.name.clone(),
                tokens: self.tokens,
                seq,
                needed: seq.saturating_add(1),
            }),
            samples => Ok(samples),
        }
    }

    /// Appends sample `sample`, the `seq + 1` tokens from `sample * seq`, as one row.
    ///
    /// The caller keeps `sample` below [`Self::samples`].
    pub(crate) fn read_sample(
        &self,
        sample: usize,
        vocab: usize,
        into: &mut MicroBatch,
    ) -> Result<(), DataError> {
        let (seq, first) = (into.seq, sample * into.seq);
        for position in first..=first + seq {
            let token = self.token(position);
            let id =
                token_id(i64::from(token), vocab).ok_or_else(|| DataError::TokenOutOfRange {
                    file: self.file.name.clone(),
                    token,
                    position,
                    vocab,
                })?;
            if position < first + seq {
                into.input_ids.push(id);
            }
            if position > first {
                into.targets.push(id);
            }
        }
        Ok(())
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
