//! JSONL: a document on each line.

use crate::PrepareError;
use crate::Result;
use crate::item::{Content, Item};
use crate::record_room::RecordRoom;
use crate::records::{DOCUMENTS, Document, Record};
use data::{BYTE_ORDER_MARK, FileKind};
use std::io::{self, BufRead, Cursor, Read};
use std::sync::Arc;

pub(crate) struct JsonLines {
    file: Arc<str>,
    reader: Box<dyn BufRead>,
    room: RecordRoom,
    /// Number of lines read.
    number: u64,
}

impl JsonLines {
    pub(crate) fn new(reader: Box<dyn BufRead>, file: Arc<str>, room: RecordRoom) -> JsonLines {
        JsonLines {
            file,
            reader,
            room,
            number: 0,
        }
    }

    /// The next line that is not blank, unparsed.
    pub(crate) fn next(&mut self) -> Result<Option<Item>> {
        loop {
            let mut json = Vec::new();
            let read = self.room.read_line(&mut *self.reader, &mut json);
            if read.map_err(PrepareError::unreadable(&self.file))? == 0 {
                return Ok(None);
            }
            self.number += 1;
            if !self.room.has(json.len()) {
                return Err(self
                    .room
                    .refuse(&self.file, format!("line {}", self.number)));
            }
            if !json.trim_ascii().is_empty() {
                let place = ("line", self.number);
                let content = Content::Json { place, json };
                return Ok(Some(Item::whole(&self.file, content)));
            }
        }
    }
}

/// Looks at the beginning of a reader: returns the kind of its contents, whether the first line that is not blank is a
/// document, and a reader of the same bytes. Of a line that is longer than a record may be, only the beginning is read, and it
/// counts as a document if it begins like one: reading it as a document then says what is too long.
pub(crate) fn look(
    mut reader: Box<dyn BufRead>,
    room: RecordRoom,
) -> io::Result<(FileKind, bool, Box<dyn BufRead>)> {
    const PART: u64 = 8192;
    let mut head = Vec::new();
    reader.by_ref().take(PART).read_to_end(&mut head)?;
    let mut start = match head.starts_with(BYTE_ORDER_MARK) {
        true => BYTE_ORDER_MARK.len(),
        false => 0,
    };
    loop {
        start += head[start..].len() - head[start..].trim_ascii_start().len();
        let more = start == head.len() && reader.by_ref().take(PART).read_to_end(&mut head)? > 0;
        if !more {
            break;
        }
    }
    // A text may be one long line, so the line is only read if it begins like a document.
    let mut is_document = false;
    if head.get(start) == Some(&b'{') {
        if !head[start..].contains(&b'\n') {
            room.read_line(&mut *reader, &mut head)?;
        }
        let line = head[start..].split(|byte| *byte == b'\n').next();
        let line = line.unwrap_or_default();
        is_document = !room.has(line.len()) || !matches!(parse(line), Document::Neither(_));
    }
    let kind = FileKind::of(&head);
    Ok((kind, is_document, Box::new(Cursor::new(head).chain(reader))))
}

/// The document on a line.
pub(crate) fn parse(json: &[u8]) -> Document {
    let json = json.strip_prefix(BYTE_ORDER_MARK).unwrap_or(json);
    // serde would read a list as the fields in order.
    if json.trim_ascii_start().starts_with(b"[") {
        let reason =
            "it begins a list, and a line is one object; `jq -c '.[]' FILE` makes lines of a list";
        return Document::Neither(reason.into());
    }
    match serde_json::from_slice::<Record>(json) {
        Ok(record) => record.document(),
        Err(error) => {
            // Only the column within the line, because serde's own count of lines starts here.
            let text = error.to_string();
            let text = text.split(" at line ").next().unwrap_or_default();
            let column = error.column();
            Document::Neither(format!(
                "it is not a JSON object with {DOCUMENTS}: {text} at column {column}"
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_line_tells() {
        let blank = " \n".repeat(5000);
        for (bytes, expected) in [
            ("{\"text\": 1}", false),
            ("{\"text\": \"a\"}", true),
            ("\u{feff}\n {\"messages\": []}\nnot read", true),
            (&(blank.clone() + "{\"text\": \"a\"}\n{"), true),
            (&(blank.clone() + "x"), false),
            (&blank, false),
            ("{\n\"text\": \"a\"}", false),
            ("{", false),
            ("\u{feff}", false),
            ("", false),
        ] {
            let (_, found, mut reader) =
                look(Box::new(Cursor::new(bytes.to_owned())), RecordRoom::ENDLESS).unwrap();
            let mut again = String::new();
            reader.read_to_string(&mut again).unwrap();
            assert_eq!((found, &again[..]), (expected, bytes));
        }
    }

    /// A line that begins like a document and is too long to be held is one, so that it is never taken for text.
    #[test]
    fn lines_that_are_too_long_are_refused_with_their_number() {
        let text = format!(
            "{{\"text\": \"a\"}}\n{{\"text\": \"{}\"}}\n",
            "b".repeat(50)
        );
        let room = RecordRoom::of(30);
        let mut lines = JsonLines::new(Box::new(Cursor::new(text)), "a.jsonl".into(), room);
        assert!(lines.next().unwrap().is_some());
        let refused = lines.next().unwrap_err();
        assert!(refused.is_out_of_memory());
        let words = "a.jsonl, line 2: it has more than 30 bytes";
        assert!(refused.to_string().starts_with(words), "{refused}");
        let first = format!("{{\"other\": \"{}\"", "b".repeat(50));
        let looked = look(Box::new(Cursor::new(first)), room).unwrap();
        assert!(looked.1);
    }

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
