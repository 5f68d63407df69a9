//! A list of JSON objects, with a document in each element. Many data sets of instructions have this form.

use crate::PrepareError;
use crate::Result;
use crate::item::{Content, Item};
use crate::record_room::RecordRoom;
use data::BYTE_ORDER_MARK;
use std::io::{self, BufRead, ErrorKind};
use std::sync::Arc;

pub(crate) struct JsonList {
    file: Arc<str>,
    reader: Box<dyn BufRead>,
    room: RecordRoom,
    /// Number of elements read.
    number: u64,
    ended: bool,
}

impl JsonList {
    /// Opens a file that begins with a bracket, after blanks and a byte order mark.
    pub(crate) fn new(
        mut reader: Box<dyn BufRead>,
        file: Arc<str>,
        room: RecordRoom,
    ) -> Result<JsonList> {
        let mut before = Vec::new();
        let read = reader.read_until(b'[', &mut before);
        read.map_err(PrepareError::unreadable(&file))?;
        let blank = before.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&before);
        debug_assert_eq!(blank.trim_ascii(), b"[", "the caller saw this list");
        Ok(JsonList {
            file,
            reader,
            room,
            number: 0,
            ended: false,
        })
    }

    /// The next element, unparsed.
    pub(crate) fn next(&mut self) -> Result<Option<Item>> {
        let json = self
            .element()
            .map_err(PrepareError::unreadable(&self.file))?;
        if !self.room.has(json.len()) {
            let place = format!("element {}", self.number + 1);
            return Err(self.room.refuse(&self.file, place));
        }
        if json.is_empty() {
            return self.refuse_more().map(|()| None);
        }
        self.number += 1;
        let place = ("element", self.number);
        Ok(Some(Item::whole(&self.file, Content::Json { place, json })))
    }

    /// Refuses a file that has more after its list.
    fn refuse_more(&mut self) -> Result {
        let follows = self
            .follows()
            .map_err(PrepareError::unreadable(&self.file))?;
        match follows {
            None => Ok(()),
            Some(follows) => Err(PrepareError::BadDocument {
                file: self.file.to_string(),
                place: "after its list".into(),
                reason: format!(
                    "there is `{follows}`; a file of JSON holds one list, with all documents in it"
                ),
            }),
        }
    }

    /// The first characters after the list, except blanks; none if there are none.
    fn follows(&mut self) -> io::Result<Option<String>> {
        const SHOWN: usize = 40;
        loop {
            let buffer = self.reader.fill_buf()?;
            let more = buffer.trim_ascii_start();
            if !more.is_empty() {
                let shown = &more[..more.len().min(SHOWN)];
                return Ok(Some(String::from_utf8_lossy(shown).trim_end().into()));
            }
            match buffer.len() {
                0 => return Ok(None),
                blanks => self.reader.consume(blanks),
            }
        }
    }

    /// The bytes up to the next comma between elements, or to the end of the list; empty after the last element. Little more
    /// than a record may have.
    fn element(&mut self) -> io::Result<Vec<u8>> {
        let mut json = Vec::new();
        if self.ended {
            return Ok(json);
        }
        let (mut depth, mut in_text, mut escaped) = (0u32, false, false);
        loop {
            let buffer = self.reader.fill_buf()?;
            if buffer.is_empty() {
                let reason = "the list in it has no end";
                return Err(io::Error::new(ErrorKind::UnexpectedEof, reason));
            }
            let mut end = None;
            for (at, byte) in buffer.iter().enumerate() {
                match byte {
                    _ if escaped => escaped = false,
                    b'\\' if in_text => escaped = true,
                    b'"' => in_text = !in_text,
                    _ if in_text => {}
                    b'{' | b'[' => depth += 1,
                    b',' | b']' if depth == 0 => {
                        end = Some(at);
                        break;
                    }
                    b'}' | b']' => depth = depth.saturating_sub(1),
                    _ => {}
                }
            }
            let taken = end.unwrap_or(buffer.len());
            json.extend_from_slice(&buffer[..taken]);
            let stops = end.map(|at| buffer[at]);
            let used = taken + usize::from(end.is_some());
            self.reader.consume(used);
            match stops {
                None if !self.room.has(json.len()) => return Ok(json),
                None => {}
                Some(b']') => {
                    self.ended = true;
                    return match json.trim_ascii() {
                        [] => Ok(Vec::new()),
                        _ => Ok(json),
                    };
                }
                // An empty element would look like the end. A blank one is refused as invalid.
                Some(_) => {
                    json.push(b' ');
                    return Ok(json);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufReader, Cursor};

    fn open(reader: impl BufRead + 'static) -> Result<JsonList> {
        JsonList::new(Box::new(reader), "a.json".into(), RecordRoom::ENDLESS)
    }

    fn elements(text: &str, buffer: usize) -> Vec<String> {
        let reader = BufReader::with_capacity(buffer, Cursor::new(text.to_owned()));
        let mut list = open(reader).unwrap();
        let items = std::iter::from_fn(|| list.next().unwrap());
        let text = |item: Item| match item.content {
            Content::Json { json, .. } => String::from_utf8(json.trim_ascii().to_vec()).unwrap(),
            other => panic!("{other:?}"),
        };
        items.map(text).collect()
    }

    #[test]
    fn elements_are_cut_at_commas_between_them_alone() {
        let list = "\n [ {\"a\": \"],\\\"{\", \"b\": [1, {}]} ,\n{\"c\": 2}\n]\n";
        for buffer in [1, 3, 1000] {
            let expected = ["{\"a\": \"],\\\"{\", \"b\": [1, {}]}", "{\"c\": 2}"];
            assert_eq!(elements(list, buffer), expected);
        }
        assert_eq!(elements("[]", 8), [""; 0]);
        assert_eq!(elements("[{},]", 8), ["{}"]);
    }

    #[test]
    fn blank_elements_come_as_elements() {
        assert_eq!(elements("[{},,{}]", 8), ["{}", "", "{}"]);
        let error = open(Cursor::new("[{}")).unwrap().next();
        assert!(error.unwrap_err().to_string().contains("has no end"));
    }

    #[test]
    fn elements_that_are_too_long_are_refused_with_their_number() {
        let list = format!("[{{}}, {{\"text\": \"{}\"}}]", "b".repeat(50));
        for buffer in [8, 1000] {
            let reader = BufReader::with_capacity(buffer, Cursor::new(list.clone()));
            let room = RecordRoom::of(30);
            let mut list = JsonList::new(Box::new(reader), "a.json".into(), room).unwrap();
            assert!(list.next().unwrap().is_some());
            let refused = list.next().unwrap_err().to_string();
            let words = "a.json, element 2: it has more than 30 bytes";
            assert!(refused.starts_with(words), "{refused}");
        }
    }

    #[test]
    fn what_follows_the_list_is_refused() {
        for (text, follows) in [
            ("[{}] {}", "`{}`"),
            ("[{}]\n\n\n\n\n\n\n\n\n[{}]\n", "`[{}]`"),
            ("[]x", "`x`"),
        ] {
            for buffer in [8, 1000] {
                let reader = BufReader::with_capacity(buffer, Cursor::new(text));
                let mut list = open(reader).unwrap();
                let mut items = std::iter::from_fn(|| list.next().transpose());
                let error = items.find_map(Result::err).expect(text).to_string();
                let place = "a.json, after its list";
                assert!(error.contains(place), "{error}");
                assert!(buffer == 8 || error.contains(follows), "{error}");
            }
        }
        assert_eq!(elements("[{}]\n \n\n\n\n\n\n\n\n", 3), ["{}"]);
    }
}
