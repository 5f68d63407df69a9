//! Reads all inputs, each according to its kind.

use crate::PrepareError;
use crate::Result;
use crate::inputs::{Input, is_named_json};
use crate::item::Item;
use crate::json_lines::{self, JsonLines};
use crate::json_list::JsonList;
use crate::parquet_rows::ParquetRows;
use crate::record_room::RecordRoom;
use crate::text_pieces::TextPieces;
use data::FileKind;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::vec::IntoIter;
use tokenization::Tokenizer;

/// All items of all inputs, in order.
pub(crate) struct Items<'a> {
    inputs: IntoIter<Input>,
    open: Option<Source>,
    /// Bytes of all files.
    pub(crate) total: u64,
    tokenizer: &'a Tokenizer,
    room: RecordRoom,
    read: Arc<AtomicU64>,
}

enum Source {
    Text(TextPieces),
    Lines(JsonLines),
    List(JsonList),
    Rows(ParquetRows),
}

impl<'a> Items<'a> {
    /// `memory_bytes`: the memory that this process may take.
    pub(crate) fn new(
        inputs: Vec<Input>,
        tokenizer: &'a Tokenizer,
        memory_bytes: u64,
    ) -> Items<'a> {
        Items {
            total: inputs.iter().map(|input| input.bytes).sum(),
            inputs: inputs.into_iter(),
            open: None,
            tokenizer,
            room: RecordRoom::new(memory_bytes, tokenizer),
            read: Arc::default(),
        }
    }

    /// Bytes of the input files read so far.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Items of about `bytes` together; none after the last one.
    pub(crate) fn batch(&mut self, bytes: usize) -> Result<Vec<Item>> {
        let (mut batch, mut held) = (Vec::new(), 0);
        while held < bytes
            && let Some(item) = self.next_item()?
        {
            held += item.bytes();
            batch.push(item);
        }
        Ok(batch)
    }

    fn next_item(&mut self) -> Result<Option<Item>> {
        loop {
            let item = match &mut self.open {
                None => None,
                Some(Source::Text(pieces)) => pieces.next(self.tokenizer)?,
                Some(Source::Lines(lines)) => lines.next()?,
                Some(Source::List(list)) => list.next()?,
                Some(Source::Rows(rows)) => rows.next()?,
            };
            if item.is_some() {
                return Ok(item);
            }
            let Some(input) = self.inputs.next() else {
                return Ok(None);
            };
            self.open = Some(self.source(&input)?);
        }
    }

    fn source(&self, input: &Input) -> Result<Source> {
        let file: Arc<str> = input.name().into();
        let path = input.path.as_deref();
        // Parquet describes its rows at the end, so it cannot be read as a stream.
        let is_parquet = |path: &&Path| path.extension().is_some_and(|end| end == "parquet");
        if let Some(path) = path.filter(is_parquet) {
            return self.rows(path, file, input.bytes);
        }
        let unreadable = PrepareError::unreadable(&file);
        let (reader, is_plain) = input.open(&self.read).map_err(unreadable)?;
        let looked = json_lines::look(reader, self.room).map_err(PrepareError::unreadable(&file));
        let (kind, is_document, reader) = looked?;
        let says_json = path.is_some_and(is_named_json);
        match (kind, path) {
            (FileKind::JsonList, _) => Ok(Source::List(JsonList::new(reader, file, self.room)?)),
            (FileKind::Text | FileKind::JsonLines, _) if says_json || is_document => {
                Ok(Source::Lines(JsonLines::new(reader, file, self.room)))
            }
            (FileKind::Text | FileKind::JsonLines, _) => {
                Ok(Source::Text(TextPieces::new(reader, file, self.room)))
            }
            (FileKind::Parquet, Some(path)) if is_plain => self.rows(path, file, input.bytes),
            (FileKind::Parquet, _) => Err(PrepareError::PackedParquet {
                file: file.to_string(),
            }),
            (kind, _) => Err(PrepareError::NotText {
                file: file.to_string(),
                what: kind.name(),
            }),
        }
    }

    fn rows(&self, path: &Path, file: Arc<str>, bytes: u64) -> Result<Source> {
        self.read.fetch_add(bytes, Ordering::Relaxed);
        Ok(Source::Rows(ParquetRows::open(path, file, self.room)?))
    }
}
