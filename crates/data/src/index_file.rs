//! The index beside a shard, with what llm.c's layout lacks: document starts, masked tokens, and checksums.

use crate::Result;
use std::{
    fs::File,
    io::Read,
    ops::Range,
    path::{Path, PathBuf},
};

use crate::DataError;

const MAGIC: &[u8; 8] = b"TRNRIDX1";

/// Magic, then the numbers of tokens, documents and masked ranges, bytes of text, block size, and number of checksums.
const HEADER_BYTES: usize = 8 + 6 * 8;

/// The file ends with a CRC-32 of everything before.
const CHECKSUM_BYTES: usize = 4;

/// The contents of a `.idx` file, about the `.bin` file beside it.
///
/// Little-endian: magic, six numbers in u64, document starts and masked ranges in u64, checksums in u32, and a CRC-32
/// of all of these.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShardIndex {
    /// Tokens in the shard.
    pub tokens: u64,
    /// The first tokens of documents: strictly ascending, and below [`Self::tokens`]. Tokens before the first one
    /// belong to the last document of the shard before. The last document may continue in the next shard.
    pub documents: Vec<u64>,
    /// Tokens that are never targets: non-empty ranges, ascending, without overlaps.
    pub masked: Vec<Range<u64>>,
    /// Bytes of the text that was encoded.
    pub text_bytes: u64,
    /// The CRC-32 of each [`Self::BLOCK_BYTES`] bytes of the shard's file, header included. The last may be shorter.
    pub checksums: Vec<u32>,
}

impl ShardIndex {
    /// Bytes of a shard's file for each checksum.
    pub const BLOCK_BYTES: usize = 1 << 20;

    /// The path of a shard's index.
    pub(crate) fn path(shard: &Path) -> PathBuf {
        shard.with_extension("idx")
    }

    /// The file's bytes. The caller must keep the fields as [`Self::check`] requires.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let counts = [
            self.tokens,
            self.documents.len() as u64,
            self.masked.len() as u64,
            self.text_bytes,
            Self::BLOCK_BYTES as u64,
            self.checksums.len() as u64,
        ];
        let ranges = self
            .masked
            .iter()
            .flat_map(|range| [range.start, range.end]);
        let words = counts
            .into_iter()
            .chain(self.documents.iter().copied())
            .chain(ranges);
        let mut bytes = MAGIC.to_vec();
        bytes.extend(words.flat_map(u64::to_le_bytes));
        bytes.extend(self.checksums.iter().flat_map(|crc| crc.to_le_bytes()));
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes
    }

    /// Reads the bytes of an index file, which may be malicious. Errors are the rest of a sentence that begins with the
    /// file's name.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let counts = Counts::parse(bytes)?;
        let entries = counts.entries(bytes)?;
        // The conversions cannot fail, because the file has the length that these numbers require.
        let (starts, rest) = entries.split_at(8 * counts.documents as usize);
        let (ranges, checksums) = rest.split_at(16 * counts.masked as usize);
        let ends: Vec<u64> = words(ranges).collect();
        let ranges = ends.as_chunks().0.iter();
        let checksums = checksums.as_chunks().0.iter();
        let index = Self {
            tokens: counts.tokens,
            documents: words(starts).collect(),
            masked: ranges.map(|&[start, end]| start..end).collect(),
            text_bytes: counts.text_bytes,
            checksums: checksums.map(|crc| u32::from_le_bytes(*crc)).collect(),
        };
        index.check()?;
        Ok(index)
    }

    /// Checks that documents and masked ranges are in order and within the shard. The error is about the first one that
    /// is not, as the rest of a sentence that begins with the file's name.
    pub(crate) fn check(&self) -> Result<(), String> {
        let tokens = self.tokens;
        for (number, pair) in self.documents.windows(2).enumerate() {
            if pair[0] >= pair[1] {
                return Err(format!(
                    "has document {} begin at {}, not after {}",
                    number + 1,
                    pair[1],
                    pair[0]
                ));
            }
        }
        if let Some(last) = self.documents.last().filter(|&&last| last >= tokens) {
            return Err(format!(
                "has a document begin at {last}, beyond the shard's {tokens} tokens"
            ));
        }
        let mut free = 0;
        for (number, range) in self.masked.iter().enumerate() {
            if range.start < free || range.end <= range.start || range.end > tokens {
                return Err(format!(
                    "masks {range:?} as range {number}: empty, out of order, or beyond the shard's {tokens} tokens"
                ));
            }
            free = range.end;
        }
        Ok(())
    }

    /// Reads the index beside a shard.
    ///
    /// # Errors
    ///
    /// [`DataError::Unreadable`] and [`DataError::BadIndex`].
    pub fn beside(shard: &Path) -> Result<Self> {
        Self::open_with_checksum(&Self::path(shard)).map(|(index, _)| index)
    }

    /// Whether the index beside a shard has masked ranges, by its header alone; none if there is no such index.
    pub(crate) fn masks(shard: &Path) -> Option<bool> {
        let mut header = [0; HEADER_BYTES + CHECKSUM_BYTES];
        File::open(Self::path(shard))
            .ok()?
            .read_exact(&mut header)
            .ok()?;
        Some(Counts::parse(&header).ok()?.masked > 0)
    }

    /// The index, and the CRC-32 of all of it.
    pub(crate) fn open_with_checksum(path: &Path) -> Result<(Self, u32)> {
        let file = || path.display().to_string();
        let bytes = files::read_regular(path).map_err(|reason| DataError::Unreadable {
            file: file(),
            reason,
        })?;
        let index = Self::parse(&bytes).map_err(|reason| DataError::BadIndex {
            file: file(),
            reason,
        })?;
        let crc = bytes
            .last_chunk()
            .expect("a parsed index ends in its checksum");
        Ok((index, u32::from_le_bytes(*crc)))
    }
}

/// The header.
struct Counts {
    tokens: u64,
    documents: u64,
    masked: u64,
    text_bytes: u64,
    block: u64,
    checksums: u64,
}

impl Counts {
    fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() >= MAGIC.len() && !bytes.starts_with(MAGIC) {
            return Err("does not begin with TRNRIDX1, so it is no index of a shard".to_owned());
        }
        let (held, least) = (bytes.len(), HEADER_BYTES + CHECKSUM_BYTES);
        if held < least {
            return Err(format!(
                "holds {held} bytes, less than the {least} of an index"
            ));
        }
        let mut words = words(&bytes[MAGIC.len()..HEADER_BYTES]);
        let mut next = || words.next().expect("a header has six counts");
        Ok(Self {
            tokens: next(),
            documents: next(),
            masked: next(),
            text_bytes: next(),
            block: next(),
            checksums: next(),
        })
    }

    /// The bytes after the header, if the file has the right length and checksum.
    fn entries<'a>(&self, bytes: &'a [u8]) -> Result<&'a [u8], String> {
        let [documents, masked, checksums] =
            [self.documents, self.masked, self.checksums].map(u128::from);
        let entries = 8 * documents + 16 * masked + 4 * checksums;
        let wanted = (HEADER_BYTES + CHECKSUM_BYTES) as u128 + entries;
        if wanted != bytes.len() as u128 {
            let held = bytes.len();
            return Err(format!(
                "should be {wanted} bytes by its header, but holds {held}: it was cut short or changed"
            ));
        }
        let (body, checksum) = bytes.split_at(bytes.len() - CHECKSUM_BYTES);
        if crc32fast::hash(body).to_le_bytes() != checksum {
            return Err("does not match its own checksum: it was changed".to_owned());
        }
        if self.block != ShardIndex::BLOCK_BYTES as u64 {
            return Err(format!(
                "has checksums of {} bytes each; only {} are read",
                self.block,
                ShardIndex::BLOCK_BYTES
            ));
        }
        Ok(&body[HEADER_BYTES..])
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|word| u64::from_le_bytes(*word))
}

#[cfg(test)]
mod tests;
