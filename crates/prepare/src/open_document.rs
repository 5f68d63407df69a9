//! Holds a document until its split is known; a long one is held on the disk.

use crate::PrepareError;
use crate::Result;
use crate::encode::Encoded;
use crate::shards::Shards;
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use tempfile::SpooledTempFile;

/// The most bytes of tokens that are held in memory.
const IN_MEMORY: usize = 16 << 20;

/// Number of tokens that are read back at a time.
const CHUNK: u64 = 64 << 10;

/// A document, or the part of it that was read so far.
pub(crate) struct OpenDocument {
    folder: PathBuf,
    file: BufWriter<SpooledTempFile>,
    pub(crate) tokens: u64,
    masked: Vec<Range<u64>>,
    further: Vec<u64>,
    is_pair: bool,
    text_bytes: u64,
}

impl OpenDocument {
    /// An empty document, whose file will be in `folder` if it gets long.
    pub(crate) fn new(folder: &Path) -> OpenDocument {
        OpenDocument {
            folder: folder.into(),
            file: BufWriter::new(tempfile::spooled_tempfile_in(IN_MEMORY, folder)),
            tokens: 0,
            masked: Vec::new(),
            further: Vec::new(),
            is_pair: false,
            text_bytes: 0,
        }
    }

    pub(crate) fn push(&mut self, encoded: &Encoded) -> Result {
        let bytes: Vec<u8> = encoded
            .tokens
            .iter()
            .flat_map(|token| token.to_le_bytes())
            .collect();
        self.file
            .write_all(&bytes)
            .map_err(PrepareError::unwritable(&self.folder))?;
        let base = self.tokens;
        self.masked.extend(
            encoded
                .masked
                .iter()
                .map(|range| base + range.start..base + range.end),
        );
        let further = encoded.further.iter();
        self.further.extend(further.map(|begins| base + begins));
        self.is_pair |= encoded.is_pair;
        self.tokens += encoded.tokens.len() as u64;
        self.text_bytes += encoded.text_bytes;
        Ok(())
    }

    /// Writes `tokens` of it as a document of `shards`, with bytes of text in proportion.
    pub(crate) fn write(&mut self, tokens: Range<u64>, shards: &mut Shards) -> Result {
        let (whole, text_bytes) = (u128::from(self.tokens.max(1)), u128::from(self.text_bytes));
        let text = |before: u64| (text_bytes * u128::from(before) / whole) as u64;
        let failed = |error| PrepareError::unwritable(&self.folder)(error);
        self.file.flush().map_err(failed)?;
        let mut reader = BufReader::new(self.file.get_mut());
        reader
            .seek(SeekFrom::Start(4 * tokens.start))
            .map_err(failed)?;
        let mut at = tokens.start;
        while at < tokens.end {
            let end = tokens.end.min(at + CHUNK);
            let mut bytes = vec![0; 4 * (end - at) as usize];
            reader.read_exact(&mut bytes).map_err(failed)?;
            let masked = self.masked.iter();
            let masked =
                masked.map(|range| range.start.clamp(at, end) - at..range.end.clamp(at, end) - at);
            shards.push(&Encoded {
                tokens: bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|token| u32::from_le_bytes(*token))
                    .collect(),
                masked: masked.filter(|range| !range.is_empty()).collect(),
                text_bytes: text(end) - text(at),
                starts: at == tokens.start,
                further: self
                    .further
                    .iter()
                    .filter(|begins| (at..end).contains(*begins))
                    .map(|begins| begins - at)
                    .collect(),
                is_pair: self.is_pair,
                ..Encoded::default()
            })?;
            at = end;
        }
        Ok(())
    }
}
