//! A document, or a piece of a long text, which is encoded at once.

use crate::records::Document;
use std::sync::Arc;

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

/// The content that was read.
#[derive(Debug)]
pub(crate) enum Content {
    Text(String),
    /// An object: `line` or `element`, and its number.
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

    /// About as many bytes as it takes.
    pub(crate) fn bytes(&self) -> usize {
        let content = match &self.content {
            Content::Text(text) => text.len(),
            Content::Json { json, .. } => json.len(),
            Content::Row { document, .. } => document.bytes(),
        };
        size_of::<Item>() + content
    }
}
