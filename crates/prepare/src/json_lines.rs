//! JSONL: a document a line, with `text` or `messages`.

use crate::PrepareError;
use crate::items::{Content, Document, Item};
use serde::Deserialize;
use serde_json::Value;
use std::io::BufRead;
use std::sync::Arc;

pub(crate) struct JsonLines {
    file: Arc<str>,
    reader: Box<dyn BufRead>,
    /// Lines read.
    number: u64,
}

impl JsonLines {
    pub(crate) fn new(reader: Box<dyn BufRead>, file: Arc<str>) -> JsonLines {
        JsonLines {
            file,
            reader,
            number: 0,
        }
    }

    /// The next line that is not blank, not parsed yet.
    pub(crate) fn next(&mut self) -> Result<Option<Item>, PrepareError> {
        loop {
            let mut json = Vec::new();
            let read = self.reader.read_until(b'\n', &mut json);
            if read.map_err(PrepareError::unreadable(&self.file))? == 0 {
                return Ok(None);
            }
            self.number += 1;
            if !json.trim_ascii().is_empty() {
                let number = self.number;
                return Ok(Some(Item::whole(
                    &self.file,
                    Content::Line { number, json },
                )));
            }
        }
    }
}

#[derive(Deserialize)]
struct Record {
    text: Option<String>,
    messages: Option<Value>,
}

/// What a line says; `messages` where it has both.
pub(crate) fn parse(json: &[u8]) -> Document {
    let json = json.strip_prefix(b"\xef\xbb\xbf").unwrap_or(json);
    match serde_json::from_slice(json) {
        Ok(Record {
            messages: Some(messages),
            ..
        }) => Document::Messages(messages),
        Ok(Record {
            text: Some(text), ..
        }) => Document::Text(text),
        Ok(_) => Document::Neither("it has neither `text` nor `messages`".into()),
        Err(error) => {
            // The place within the line; serde counts lines of its own.
            let text = error.to_string();
            let text = text.split(" at line ").next().unwrap_or_default();
            let column = error.column();
            Document::Neither(format!(
                "it is not a JSON object with `text` or `messages`: {text} at column {column}"
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn lines_of_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            parse(&bytes);
        }

        #[test]
        fn lines_that_are_nearly_right(cut in 0usize..60, with in "[\\[\\]{}\",:a0\\\\ ]{0,6}") {
            let mut line = r#"{"text": "a", "messages": [{"role": "user", "content": "b"}]}"#.to_owned();
            line.insert_str(cut, &with);
            parse(line.as_bytes());
        }

        #[test]
        fn texts_come_back(text in "\\PC*") {
            let line = serde_json::json!({"id": 1, "text": text}).to_string();
            prop_assert!(matches!(parse(line.as_bytes()), Document::Text(found) if found == text));
        }
    }
}
