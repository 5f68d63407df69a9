//! The largest record for which there is memory. A record is held as a whole, with its tokens, and the system ends a process
//! that asks for more memory than there is.

use crate::PrepareError;
use std::io::{self, BufRead, Read};
use tokenization::Tokenizer;

/// Memory for each byte of a record. The record before and the one after may be in memory too.
const OF_BYTES: u64 = 24;

/// The same where Hugging Face's library encodes, which keeps words, offsets and masks for each token.
const OF_HUGGING_FACE: u64 = 96;

/// The memory for a record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordRoom {
    memory_bytes: u64,
    most: u64,
}

impl RecordRoom {
    /// The room of a process that may take so much memory.
    pub(crate) fn new(memory_bytes: u64, tokenizer: &Tokenizer) -> RecordRoom {
        let for_a_byte = match tokenizer.folder() {
            None => OF_BYTES,
            Some(_) => OF_HUGGING_FACE,
        };
        RecordRoom {
            memory_bytes,
            most: memory_bytes / for_a_byte,
        }
    }

    /// Without a bound.
    #[cfg(test)]
    pub(crate) const ENDLESS: RecordRoom = RecordRoom::of(u64::MAX - 1);

    /// Room for records of at most so many bytes.
    #[cfg(test)]
    pub(crate) const fn of(most: u64) -> RecordRoom {
        RecordRoom {
            memory_bytes: u64::MAX,
            most,
        }
    }

    /// Whether a record may have so many bytes.
    pub(crate) fn has(self, bytes: usize) -> bool {
        bytes as u64 <= self.most
    }

    /// Reads up to the next newline, but little more than a record may have; returns how many bytes that were.
    pub(crate) fn read_line(
        self,
        reader: &mut dyn BufRead,
        line: &mut Vec<u8>,
    ) -> io::Result<usize> {
        reader.take(self.most + 1).read_until(b'\n', line)
    }

    /// The error for a record that has more.
    pub(crate) fn refuse(self, file: &str, place: String) -> PrepareError {
        PrepareError::TooLong {
            file: file.into(),
            place,
            most: self.most,
            memory_bytes: self.memory_bytes,
        }
    }
}
