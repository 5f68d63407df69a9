//! What is encoded at once: a document, or a piece of a long text.

use crate::PrepareError;
use crate::inputs::{Input, Kind};
use crate::json_lines::{self, JsonLines};
use crate::parquet_rows::ParquetRows;
use crate::text_pieces::TextPieces;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::vec::IntoIter;
use tokenization::Tokenizer;

/// A document, or a piece of it, as it was read.
#[derive(Debug)]
pub(crate) struct Item {
    pub(crate) file: Arc<str>,
    pub(crate) content: Content,
    /// Whether a document begins with it.
    pub(crate) starts: bool,
    /// Whether a document ends with it.
    pub(crate) ends: bool,
}

/// What was read.
#[derive(Debug)]
pub(crate) enum Content {
    Text(String),
    Line { number: u64, json: Vec<u8> },
    Row { number: u64, document: Document },
}

/// What a line or a row says.
#[derive(Debug)]
pub(crate) enum Document {
    Text(String),
    /// Messages, and the tools that there are, or null.
    Chat(Vec<Value>, Value),
    /// Neither; what it has instead.
    Neither(String),
}

impl Document {
    /// What a record with these fields says: its `messages` where it has both, and null as if it were not there. Messages
    /// and tools may be written as JSON within a text.
    pub(crate) fn of(text: Option<String>, messages: Value, tools: Value) -> Document {
        match (messages, text) {
            (Value::Null, Some(text)) => Document::Text(text),
            (Value::Null, None) => Document::Neither("it has neither `text` nor `messages`".into()),
            (messages, _) => match (list("messages", messages), list("tools", tools)) {
                (Ok(Value::Array(messages)), Ok(tools)) => Document::Chat(messages, tools),
                (Err(reason), _) | (_, Err(reason)) => Document::Neither(reason),
                _ => Document::Neither("its `messages` are null".into()),
            },
        }
    }
}

/// A list or null, or the JSON of one.
fn list(name: &str, value: Value) -> Result<Value, String> {
    let value = match value {
        Value::String(json) => serde_json::from_str(&json)
            .map_err(|error| format!("its `{name}` are a text that is not JSON: {error}"))?,
        value => value,
    };
    match value {
        Value::Array(_) | Value::Null => Ok(value),
        _ => Err(format!("its `{name}` are not a list")),
    }
}

impl Item {
    pub(crate) fn whole(file: &Arc<str>, content: Content) -> Item {
        Item {
            file: Arc::clone(file),
            content,
            starts: true,
            ends: true,
        }
    }

    /// About as many bytes as it takes.
    pub(crate) fn bytes(&self) -> usize {
        match &self.content {
            Content::Text(text) => text.len(),
            Content::Line { json, .. } => json.len(),
            Content::Row {
                document: Document::Text(text),
                ..
            } => text.len(),
            // Messages have no size of their own, and are a few thousand bytes.
            Content::Row { .. } => 4096,
        }
    }
}

/// All items of all inputs, in order.
pub(crate) struct Items<'a> {
    inputs: IntoIter<Input>,
    open: Option<Source>,
    tokenizer: &'a Tokenizer,
    read: Arc<AtomicU64>,
}

enum Source {
    Text(TextPieces),
    Lines(JsonLines),
    Rows(ParquetRows),
}

impl<'a> Items<'a> {
    pub(crate) fn new(inputs: Vec<Input>, tokenizer: &'a Tokenizer) -> Items<'a> {
        Items {
            inputs: inputs.into_iter(),
            open: None,
            tokenizer,
            read: Arc::default(),
        }
    }

    /// Bytes of the input files that were read.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Items of `bytes` together, or a few more; none where all was read.
    pub(crate) fn batch(&mut self, bytes: usize) -> Result<Vec<Item>, PrepareError> {
        let (mut batch, mut held) = (Vec::new(), 0);
        while held < bytes
            && let Some(item) = self.next_item()?
        {
            held += item.bytes();
            batch.push(item);
        }
        Ok(batch)
    }

    fn next_item(&mut self) -> Result<Option<Item>, PrepareError> {
        loop {
            let item = match &mut self.open {
                None => None,
                Some(Source::Text(pieces)) => pieces.next(self.tokenizer)?,
                Some(Source::Lines(lines)) => lines.next()?,
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

    fn source(&self, input: &Input) -> Result<Source, PrepareError> {
        let file: Arc<str> = input.name().into();
        let open = || {
            input
                .open(&self.read)
                .map_err(PrepareError::unreadable(&file))
        };
        if input.kind == Kind::Unnamed {
            let (lines, reader) =
                json_lines::look(open()?).map_err(PrepareError::unreadable(&file))?;
            return Ok(match lines {
                true => Source::Lines(JsonLines::new(reader, file)),
                false => Source::Text(TextPieces::new(reader, file)),
            });
        }
        Ok(match (input.kind, &input.path) {
            (Kind::Parquet, Some(path)) => {
                self.read.fetch_add(input.bytes, Ordering::Relaxed);
                Source::Rows(ParquetRows::open(path, file)?)
            }
            (Kind::JsonLines, _) => Source::Lines(JsonLines::new(open()?, file.clone())),
            _ => Source::Text(TextPieces::new(open()?, file.clone())),
        })
    }
}
