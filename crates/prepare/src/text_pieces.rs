//! Reads a text file, which is one document, in pieces that together have the tokens of the whole.

use crate::PrepareError;
use crate::Result;
use crate::item::{Content, Item};
use crate::record_room::RecordRoom;
use data::BYTE_ORDER_MARK;
use std::io::{BufRead, Read};
use std::sync::Arc;
use tokenization::Tokenizer;

/// About the number of bytes of a piece.
const PIECE: usize = 256 << 10;

pub(crate) struct TextPieces {
    file: Arc<str>,
    /// None once its end was read.
    reader: Option<Box<dyn BufRead>>,
    /// What was read but not returned yet. It begins at `offset` of the file.
    held: Vec<u8>,
    offset: u64,
    started: bool,
    room: RecordRoom,
}

impl TextPieces {
    pub(crate) fn new(reader: Box<dyn BufRead>, file: Arc<str>, room: RecordRoom) -> TextPieces {
        TextPieces {
            file,
            reader: Some(reader),
            held: Vec::new(),
            offset: 0,
            started: false,
            room,
        }
    }

    pub(crate) fn next(&mut self, tokenizer: &Tokenizer) -> Result<Option<Item>> {
        let mut wanted = PIECE;
        while self.fill(wanted)? {
            let text = self.text()?;
            if let Some(cut) = tokenizer.safe_cut(text) {
                return Ok(Some(self.give(cut)));
            }
            if !self.room.has(self.held.len()) {
                let place = format!("its text from byte {}", self.offset);
                return Err(self.room.refuse(&self.file, place));
            }
            // A text that may not be cut here is held until it may, or until it ends.
            wanted = wanted.saturating_mul(2);
        }
        if self.reader.take().is_none() {
            return Ok(None);
        }
        let whole = self.text()?.len();
        if whole < self.held.len() {
            return Err(self.not_utf8(whole));
        }
        let mut last = self.give(whole);
        last.ends = true;
        Ok(Some(last))
    }

    /// Reads until `wanted` bytes are held; false if the file ends before.
    fn fill(&mut self, wanted: usize) -> Result<bool> {
        let Some(reader) = &mut self.reader else {
            return Ok(false);
        };
        let missing = wanted.saturating_sub(self.held.len());
        let read = reader.take(missing as u64).read_to_end(&mut self.held);
        read.map_err(PrepareError::unreadable(&self.file))?;
        if !self.started && self.offset == 0 && self.held.starts_with(BYTE_ORDER_MARK) {
            self.held.drain(..BYTE_ORDER_MARK.len());
            self.offset += BYTE_ORDER_MARK.len() as u64;
            return self.fill(wanted);
        }
        Ok(self.held.len() >= wanted)
    }

    /// The held text, without an incomplete character at its end.
    fn text(&self) -> Result<&str> {
        match std::str::from_utf8(&self.held) {
            Ok(text) => Ok(text),
            Err(error) if error.error_len().is_some() => Err(self.not_utf8(error.valid_up_to())),
            Err(error) => {
                let whole = std::str::from_utf8(&self.held[..error.valid_up_to()]);
                Ok(whole.expect("valid up to here"))
            }
        }
    }

    fn give(&mut self, bytes: usize) -> Item {
        let rest = self.held.split_off(bytes);
        let text = std::mem::replace(&mut self.held, rest);
        self.offset += bytes as u64;
        Item {
            starts: !std::mem::replace(&mut self.started, true),
            ends: false,
            ..Item::whole(
                &self.file,
                Content::Text(String::from_utf8(text).expect("checked above")),
            )
        }
    }

    fn not_utf8(&self, at: usize) -> PrepareError {
        PrepareError::NotUtf8 {
            file: self.file.to_string(),
            offset: self.offset + at as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(bytes: &[u8]) -> Result<Vec<Item>> {
        let reader = Box::new(std::io::Cursor::new(bytes.to_vec()));
        let mut pieces = TextPieces::new(reader, "a.txt".into(), RecordRoom::ENDLESS);
        let bytes = Tokenizer::bytes();
        std::iter::from_fn(|| pieces.next(&bytes).transpose()).collect()
    }

    #[test]
    fn pieces_are_the_text_and_cut_no_character() {
        let text = "x".to_owned() + &"é".repeat(PIECE);
        let items = pieces(text.as_bytes()).unwrap();
        assert!(items.len() > 2);
        let ends: Vec<bool> = items.iter().map(|item| item.ends).collect();
        let starts: Vec<bool> = items.iter().map(|item| item.starts).collect();
        assert_eq!(ends.iter().position(|ends| *ends), Some(items.len() - 1));
        assert_eq!(starts.iter().rposition(|starts| *starts), Some(0));
        let joined: String = items
            .into_iter()
            .map(|item| match item.content {
                Content::Text(text) => text,
                other => panic!("{other:?}"),
            })
            .collect();
        assert!(joined == text);
    }

    #[test]
    fn other_encodings_are_named_with_their_place() {
        for (bytes, at) in [
            (&b"abc\xff"[..], 3),
            (b"\xef\xbb\xbfab\xe9", 5),
            (b"\xc3", 0),
        ] {
            match pieces(bytes) {
                Err(PrepareError::NotUtf8 { offset, .. }) => assert_eq!(offset, at),
                other => panic!("{other:?}"),
            }
        }
    }
}
