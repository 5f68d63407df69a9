//! Writes shards: llm.c's token files, each with its index.

use std::{
    fs::File,
    io::{self, BufWriter, IntoInnerError, Seek, Write},
    ops::Range,
    path::{Path, PathBuf},
};

use files::{Disk, FilesError, write_file};

use crate::{
    ShardIndex,
    checksums::BlockChecksums,
    llmc::{self, HEADER_BYTES},
    tokens::Width,
};

/// A shard that is being written: `STEM.bin`, and at the end `STEM.idx` beside it. It has no header until it is
/// finished, so an unfinished shard is never taken for a whole one.
///
/// ```
/// use data::{ShardIndex, ShardWriter};
///
/// let folder = tempfile::tempdir()?;
/// let mut shard = ShardWriter::create(folder.path(), "train-00000", 50257)?;
/// shard.start_document();
/// shard.push(&[1, 2, 3], [0..2], 12)?; // the first two tokens are never targets
/// let index = shard.finish()?;
/// assert_eq!((index.documents, index.text_bytes), (vec![0], 12));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ShardWriter {
    folder: PathBuf,
    stem: String,
    vocab: usize,
    width: Width,
    file: BufWriter<File>,
    checksums: BlockChecksums,
    index: ShardIndex,
    starts: bool, // a document, with the next token
}

impl ShardWriter {
    /// Creates a shard for tokens below `vocab`: in u16 if they fit, else in u32.
    ///
    /// # Errors
    ///
    /// [`FilesError::File`].
    pub fn create(folder: &Path, stem: &str, vocab: usize) -> Result<Self, FilesError> {
        let path = bin(folder, stem);
        let create = || {
            let mut file = BufWriter::new(File::create(&path)?);
            file.write_all(&[0; HEADER_BYTES])?;
            Ok(file)
        };
        Ok(Self {
            file: create().map_err(FilesError::at("write", &path))?,
            folder: folder.into(),
            stem: stem.into(),
            vocab,
            width: llmc::width(vocab),
            checksums: BlockChecksums::after_header(HEADER_BYTES),
            index: ShardIndex::default(),
            starts: false,
        })
    }

    /// Tokens so far.
    pub fn tokens(&self) -> u64 {
        self.index.tokens
    }

    /// Starts a document with the next token.
    pub fn start_document(&mut self) {
        self.starts = true;
    }

    /// Appends tokens of `text_bytes` bytes of text. The tokens in `masked`, ascending ranges of `tokens`, are never
    /// targets.
    ///
    /// # Errors
    ///
    /// [`FilesError::File`], also for a token outside the vocabulary and for more tokens than llm.c's header counts.
    pub fn push(
        &mut self,
        tokens: &[u32],
        masked: impl IntoIterator<Item = Range<u64>>,
        text_bytes: u64,
    ) -> Result<(), FilesError> {
        let written = self.write(tokens);
        written.map_err(FilesError::at("write", &bin(&self.folder, &self.stem)))?;
        let (base, index) = (self.index.tokens, &mut self.index);
        if !tokens.is_empty() && std::mem::take(&mut self.starts) {
            index.documents.push(base);
        }
        let masked = masked.into_iter().filter(|range| !range.is_empty());
        let masked = masked.map(|range| base + range.start..base + range.end);
        index.masked.extend(masked);
        index.tokens += tokens.len() as u64;
        index.text_bytes += text_bytes;
        Ok(())
    }

    fn write(&mut self, tokens: &[u32]) -> io::Result<()> {
        let refused = |reason: String| io::Error::new(io::ErrorKind::InvalidInput, reason);
        if self.index.tokens + tokens.len() as u64 > i32::MAX as u64 {
            return Err(refused(format!("a shard holds {} tokens", i32::MAX)));
        }
        let vocab = self.vocab;
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocab) {
            let reason = format!("token {token} is outside the vocabulary of {vocab}");
            return Err(refused(reason));
        }
        let tokens = tokens.iter();
        let bytes: Vec<u8> = match self.width {
            Width::U16 => tokens
                .flat_map(|token| (*token as u16).to_le_bytes())
                .collect(),
            _ => tokens.flat_map(|token| token.to_le_bytes()).collect(),
        };
        self.checksums.update(&bytes);
        self.file.write_all(&bytes)
    }

    /// Writes header and index, and makes the contents of both files durable. Their names are durable after
    /// [`sync_folder`](files::FileSystem::sync_folder).
    ///
    /// # Errors
    ///
    /// [`FilesError::File`], also for masked ranges that are out of order or out of range.
    pub fn finish(self) -> Result<ShardIndex, FilesError> {
        let mut index = self.index;
        let header = llmc::header(self.width, index.tokens as i32);
        let in_order = index.check().map_err(io::Error::other);
        let write = || {
            let mut file = self.file.into_inner().map_err(IntoInnerError::into_error)?;
            file.rewind()?;
            file.write_all(&header)?;
            file.sync_all()
        };
        let written = in_order.and_then(|()| write());
        written.map_err(FilesError::at("write", &bin(&self.folder, &self.stem)))?;
        index.checksums = self.checksums.finish(&header);
        let name = format!("{}.idx", self.stem);
        write_file(&Disk, &self.folder, &name, &index.to_bytes())?;
        Ok(index)
    }
}

fn bin(folder: &Path, stem: &str) -> PathBuf {
    folder.join(format!("{stem}.bin"))
}
