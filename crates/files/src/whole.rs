//! Reads whole files, none of them without end: a link may name a device, or another file than is meant.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// The most bytes of a configuration, a tokenizer or an index of tensors. The largest tokenizers have some 40 MB.
const SMALL_BYTES: u64 = 256 << 20;

/// The bytes of a file of at most `most` bytes.
///
/// # Errors
/// The system's error; [`ErrorKind::FileTooLarge`] for a file that is longer or never ends.
pub fn read_at_most(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > most {
        false => Ok(bytes),
        true => Err(io::Error::new(
            ErrorKind::FileTooLarge,
            format!("it has more than {most} bytes, which no such file needs"),
        )),
    }
}

/// The bytes of a file that is small by its kind: a configuration, a tokenizer, an index.
///
/// # Errors
/// As [`read_at_most`].
pub fn read_small(path: &Path) -> io::Result<Vec<u8>> {
    read_at_most(path, SMALL_BYTES)
}

/// The text of such a file.
///
/// # Errors
/// As [`read_at_most`]; [`ErrorKind::InvalidData`] for what is not UTF-8.
pub fn read_small_text(path: &Path) -> io::Result<String> {
    let not_text = |_| io::Error::new(ErrorKind::InvalidData, "it is not UTF-8");
    String::from_utf8(read_small(path)?).map_err(not_text)
}

/// The bytes of a file of any length, but of no device, which may have no end.
///
/// # Errors
/// The system's error; [`ErrorKind::InvalidInput`] for a device.
pub fn read_regular(path: &Path) -> io::Result<Vec<u8>> {
    match std::fs::metadata(path)?.is_file() {
        true => std::fs::read(path),
        false => Err(io::Error::new(
            ErrorKind::InvalidInput,
            "it is no regular file",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn files_without_end_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let endless = folder.path().join("config.json");
        symlink("/dev/zero", &endless).unwrap();
        let kind = |read: io::Result<Vec<u8>>| read.unwrap_err().kind();
        assert_eq!(kind(read_at_most(&endless, 1000)), ErrorKind::FileTooLarge);
        assert_eq!(kind(read_regular(&endless)), ErrorKind::InvalidInput);
        let file = folder.path().join("file");
        std::fs::write(&file, "abcde").unwrap();
        assert_eq!(read_at_most(&file, 5).unwrap().len(), 5);
        assert_eq!(kind(read_at_most(&file, 4)), ErrorKind::FileTooLarge);
        assert_eq!(read_regular(&file).unwrap(), read_small(&file).unwrap());
        std::fs::write(&file, b"abc\xff").unwrap();
        let refused = read_small_text(&file).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidData);
        let missing = read_small(&folder.path().join("nowhere")).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
    }
}
