//! A document, or a piece of a long text, which is encoded as a unit.

use crate::records::Document;
use std::sync::Arc;

/// A document, or a piece of it, as read from a file.
#[derive(Debug)]
pub(crate) struct Item {
    pub(crate) file: Arc<str>,
    pub(crate) content: Content,
    /// Whether a document starts with it.
    pub(crate) starts: bool,
    /// Whether a document ends with it.
    pub(crate) ends: bool,
}

/// The content of an item.
#[derive(Debug)]
pub(crate) enum Content {
    Text(String),
    /// A JSON object, with `line` or `element`, and its number.
    Json {
        place: (&'static str, u64),
        json: Vec<u8>,
    },
    Row {
        number: u64,
        document: Document,
    },
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

    /// About how many bytes of memory it takes.
    pub(crate) fn bytes(&self) -> usize {
        let content = match &self.content {
            Content::Text(text) => text.len(),
            Content::Json { json, .. } => json.len(),
            Content::Row { document, .. } => document.bytes(),
        };
        size_of::<Item>() + content
    }
}
