//! Token files of a fixed number of tokens, each with its index.

use crate::PrepareError;
use crate::encode::Encoded;
use crate::summary::SplitSummary;
use data::{BlockChecksums, ShardIndex};
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// How tokens are laid out: llm.c's two versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    U16,
    U32,
}

impl Width {
    pub(crate) fn of(vocab: usize) -> Width {
        if vocab <= 1 << 16 {
            Width::U16
        } else {
            Width::U32
        }
    }

    fn header(self, tokens: u64) -> Vec<u8> {
        let (magic, version) = match self {
            Width::U16 => (20240520, 1),
            Width::U32 => (20240801, 7),
        };
        let mut header = [0i32; 256];
        header[..3].copy_from_slice(&[magic, version, tokens as i32]);
        header.into_iter().flat_map(i32::to_le_bytes).collect()
    }

    fn bytes(self, tokens: &[u32]) -> Vec<u8> {
        match self {
            Width::U16 => tokens
                .iter()
                .flat_map(|token| (*token as u16).to_le_bytes())
                .collect(),
            Width::U32 => tokens
                .iter()
                .flat_map(|token| token.to_le_bytes())
                .collect(),
        }
    }
}

/// The shards of a split: `NAME-00000.bin`, `NAME-00000.idx`, and so on.
pub(crate) struct Shards {
    folder: PathBuf,
    name: &'static str,
    width: Width,
    /// Tokens of each shard but the last.
    capacity: u64,
    open: Option<Shard>,
    /// A document whose first token is still to come.
    starts: bool,
    pub(crate) total: SplitSummary,
}

struct Shard {
    path: PathBuf,
    file: BufWriter<File>,
    checksums: BlockChecksums,
    index: ShardIndex,
}

impl Shards {
    pub(crate) fn new(folder: &Path, name: &'static str, width: Width, capacity: u64) -> Shards {
        Shards {
            folder: folder.into(),
            name,
            width,
            capacity,
            open: None,
            starts: false,
            total: SplitSummary::default(),
        }
    }

    /// Appends tokens; the bytes of text go to the shards in proportion.
    pub(crate) fn push(&mut self, encoded: &Encoded) -> Result<(), PrepareError> {
        self.starts |= encoded.starts;
        let tokens = &encoded.tokens;
        let share = |tokens_before: usize| {
            let text = u128::from(encoded.text_bytes) * tokens_before as u128;
            (text / tokens.len() as u128) as u64
        };
        let mut at = 0;
        while at < tokens.len() {
            let mut shard = match self.open.take() {
                Some(shard) => shard,
                None => self.create()?,
            };
            let base = shard.index.tokens;
            let free = usize::try_from(self.capacity - base).unwrap_or(usize::MAX);
            let end = tokens.len().min(at.saturating_add(free));
            if std::mem::take(&mut self.starts) {
                shard.index.documents.push(base);
                self.total.documents += 1;
            }
            let within = |token: u64| base + (token.clamp(at as u64, end as u64) - at as u64);
            let masked = encoded
                .masked
                .iter()
                .map(|range| within(range.start)..within(range.end));
            shard
                .index
                .masked
                .extend(masked.filter(|range| !range.is_empty()));
            shard.index.text_bytes += share(end) - share(at);
            shard.index.tokens += (end - at) as u64;
            let bytes = self.width.bytes(&tokens[at..end]);
            shard
                .write(&bytes)
                .map_err(PrepareError::unwritable(&shard.path))?;
            at = end;
            match shard.index.tokens == self.capacity {
                true => self.finish(shard)?,
                false => self.open = Some(shard),
            }
        }
        Ok(())
    }

    /// Ends the last shard.
    pub(crate) fn close(&mut self) -> Result<(), PrepareError> {
        self.open.take().map_or(Ok(()), |shard| self.finish(shard))
    }

    /// Whether nothing was written to it.
    pub(crate) fn is_empty(&self) -> bool {
        self.total.shards == 0 && self.open.is_none()
    }

    fn create(&self) -> Result<Shard, PrepareError> {
        let path = self
            .folder
            .join(format!("{}-{:05}.bin", self.name, self.total.shards));
        let options = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path);
        let mut shard = Shard {
            file: BufWriter::new(options.map_err(PrepareError::unwritable(&path))?),
            path,
            checksums: BlockChecksums::default(),
            index: ShardIndex::default(),
        };
        let header = self.width.header(self.capacity);
        shard
            .write(&header)
            .map_err(PrepareError::unwritable(&shard.path))?;
        Ok(shard)
    }

    fn finish(&mut self, shard: Shard) -> Result<(), PrepareError> {
        let (path, header) = (shard.path.clone(), self.width.header(shard.index.tokens));
        self.total.shards += 1;
        self.total.tokens += shard.index.tokens;
        self.total.text_bytes += shard.index.text_bytes;
        self.total.masked_tokens += shard
            .index
            .masked
            .iter()
            .map(|range| range.end - range.start)
            .sum::<u64>();
        let short = shard.index.tokens < self.capacity;
        let index = shard
            .end(short.then_some(header))
            .map_err(PrepareError::unwritable(&path))?;
        let path = ShardIndex::path(&path);
        fs::write(&path, index.to_bytes()).map_err(PrepareError::unwritable(&path))
    }
}

impl Shard {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.checksums.update(bytes);
        self.file.write_all(bytes)
    }

    /// Its index; with `header` in place of the one of a full shard.
    fn end(self, header: Option<Vec<u8>>) -> io::Result<ShardIndex> {
        let mut file = self
            .file
            .into_inner()
            .map_err(io::IntoInnerError::into_error)?;
        let mut checksums = self.checksums.finish();
        if let Some(header) = header {
            file.seek(SeekFrom::Start(0))?;
            file.write_all(&header)?;
            file.seek(SeekFrom::Start(0))?;
            let mut first = Vec::new();
            (&file)
                .take(ShardIndex::BLOCK_BYTES as u64)
                .read_to_end(&mut first)?;
            checksums[0] = crc32fast::hash(&first);
        }
        file.sync_data()?;
        Ok(ShardIndex {
            checksums,
            ..self.index
        })
    }
}
