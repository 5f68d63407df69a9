//! Recognises a file's kind by its first bytes: its name can be wrong, and a model would learn an archive's bytes.

use std::path::Path;

/// A file with a NUL among this many first bytes is not text.
const HEAD: usize = 8192;

/// The byte order mark of UTF-8, with which some text files begin.
pub const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// A kind of file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// Text, or an unknown kind.
    Text,
    /// An object of JSON on each line.
    JsonLines,
    /// A list of objects of JSON.
    JsonList,
    /// Parquet.
    Parquet,
    /// Compressed by gzip.
    Gzip,
    /// Compressed by zstd.
    Zstd,
    /// A token file in llm.c's layout.
    Tokens,
    /// Another kind that is not text, by its name.
    Other(&'static str),
}

/// Signatures of files that are not text: an offset, the bytes there, and the kind.
const BEGINNINGS: &[(usize, &[u8], FileKind)] = &[
    (0, b"PAR1", FileKind::Parquet),
    (0, b"\x1f\x8b", FileKind::Gzip),
    (0, b"\x28\xb5\x2f\xfd", FileKind::Zstd),
    (0, &20240520i32.to_le_bytes(), FileKind::Tokens),
    (0, &20240801i32.to_le_bytes(), FileKind::Tokens),
    (0, b"PK\x03\x04", FileKind::Other("a zip archive")),
    (0, b"\xfd7zXZ\0", FileKind::Other("an xz archive")),
    (4, b"1AY&SY", FileKind::Other("a bzip2 archive")),
    (0, b"7z\xbc\xaf\x27\x1c", FileKind::Other("a 7z archive")),
    (0, b"Rar!\x1a\x07", FileKind::Other("a rar archive")),
    (257, b"ustar", FileKind::Other("a tar archive")),
    (0, b"\x7fELF", FileKind::Other("an executable")),
    (0, b"\xcf\xfa\xed\xfe", FileKind::Other("an executable")),
    (0, b"%PDF-", FileKind::Other("a PDF")),
    (0, b"\x89PNG", FileKind::Other("an image")),
    (0, b"\xff\xd8\xff", FileKind::Other("an image")),
    (0, b"GIF8", FileKind::Other("an image")),
    (0, b"GGUF", FileKind::Other("a GGUF model")),
    (0, b"ARROW1", FileKind::Other("an Arrow file")),
    (0, b"\x93NUMPY", FileKind::Other("a NumPy array")),
    (0, b"\x89HDF", FileKind::Other("an HDF5 file")),
    (0, b"\xff\xfe", FileKind::Other("text in UTF-16")),
    (0, b"\xfe\xff", FileKind::Other("text in UTF-16")),
];

impl FileKind {
    /// The kind of a file that begins with `head`. For JSON, `head` must have the whole first line; for other kinds a
    /// few thousand bytes are enough.
    pub fn of(head: &[u8]) -> FileKind {
        let begins = |(at, bytes, _): &&(usize, &[u8], FileKind)| {
            head.get(*at..).is_some_and(|rest| rest.starts_with(bytes))
        };
        if let Some((_, _, kind)) = BEGINNINGS.iter().find(begins) {
            return *kind;
        }
        if is_safetensors(head) {
            return FileKind::Other("safetensors");
        }
        if head[..head.len().min(HEAD)].contains(&0) {
            return FileKind::Other("binary data");
        }
        let text = head.strip_prefix(BYTE_ORDER_MARK).unwrap_or(head);
        let text = text.trim_ascii_start();
        let line = text.split(|byte| *byte == b'\n').next();
        let line = line.unwrap_or_default();
        match text.first() {
            Some(b'{') if serde_json::from_slice::<serde::de::IgnoredAny>(line).is_ok() => {
                FileKind::JsonLines
            }
            Some(b'[') if begins_with_object(&text[1..]) => FileKind::JsonList,
            _ => FileKind::Text,
        }
    }

    /// The kind of the file at `path`. If it could be text, the name decides, because a line of JSONL may be damaged.
    pub fn of_file(path: &Path, head: &[u8]) -> FileKind {
        let ending = path.extension().and_then(|ending| ending.to_str());
        match (FileKind::of(head), ending) {
            (FileKind::Text, Some("jsonl" | "ndjson")) => FileKind::JsonLines,
            (kind, _) => kind,
        }
    }

    /// The name of the kind, for messages.
    pub fn name(self) -> &'static str {
        match self {
            FileKind::Text => "text",
            FileKind::JsonLines => "JSONL",
            FileKind::JsonList => "a list in JSON",
            FileKind::Parquet => "parquet",
            FileKind::Gzip => "compressed (gzip)",
            FileKind::Zstd => "compressed (zstd)",
            FileKind::Tokens => "a token file of llm.c",
            FileKind::Other(name) => name,
        }
    }

    /// Whether `trainer prepare` can make tokens of it.
    pub fn can_be_prepared(self) -> bool {
        !matches!(self, FileKind::Tokens | FileKind::Other(_))
    }
}

/// Whether the bytes begin with a plausible length and then JSON.
fn is_safetensors(head: &[u8]) -> bool {
    const LONGEST_HEADER: u64 = 100 << 20;
    let length = head.first_chunk().map(|length| u64::from_le_bytes(*length));
    length.is_some_and(|length| length <= LONGEST_HEADER) && head.get(8) == Some(&b'{')
}

/// Whether the list's first item is an object with a key.
fn begins_with_object(rest: &[u8]) -> bool {
    let object = rest.trim_ascii_start().strip_prefix(b"{");
    object.is_some_and(|object| object.trim_ascii_start().starts_with(b"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_told_by_how_they_begin() {
        let mut tar = vec![b'a'; 300];
        tar[257..262].copy_from_slice(b"ustar");
        let other = FileKind::Other;
        for (head, expected) in [
            (&b"Once upon a time"[..], FileKind::Text),
            (b"", FileKind::Text),
            (b"caf\xe9 in Latin-1", FileKind::Text),
            (b"{\"text\": \"a\"}\nanything", FileKind::JsonLines),
            (b"\xef\xbb\xbf\n {}", FileKind::JsonLines),
            (b"{ not JSON }\n", FileKind::Text),
            (b"{\n  \"pretty\": 1\n}", FileKind::Text),
            (b"[\n {\"instruction\": ", FileKind::JsonList),
            (b"[a link](there)", FileKind::Text),
            (b"PAR1....", FileKind::Parquet),
            (b"\x1f\x8b\x08", FileKind::Gzip),
            (b"\x28\xb5\x2f\xfd", FileKind::Zstd),
            (b"PK\x03\x04", other("a zip archive")),
            (b"BZh91AY&SY", other("a bzip2 archive")),
            (&tar, other("a tar archive")),
            (b"\x7fELF\x02", other("an executable")),
            (b"a\0b", other("binary data")),
            (b"\x10\0\0\0\0\0\0\0{\"a\"", other("safetensors")),
            (&20240520i32.to_le_bytes(), FileKind::Tokens),
        ] {
            let shown = String::from_utf8_lossy(head);
            assert_eq!(FileKind::of(head), expected, "{shown}");
        }
        let damaged = FileKind::of_file(Path::new("a.jsonl"), b"{\"text\": \n");
        assert_eq!(damaged, FileKind::JsonLines);
    }
}
