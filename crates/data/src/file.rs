//! The bytes of a data file. It is mapped rather than read, because token files may exceed the host's memory.

use std::{
    fs::{self, File},
    io,
    ops::Deref,
    path::Path,
};

use memmap2::Mmap;

use crate::{DataError, Result, builtin};

/// Bytes, and their name for messages. Never empty.
#[derive(Debug)]
pub(crate) struct DataFile {
    pub(crate) name: String,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl DataFile {
    /// Maps the file at `path`.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let unreadable = |reason| DataError::Unreadable {
            file: name.clone(),
            reason,
        };
        // Checked before opening, because opening a pipe would wait for its writer.
        let metadata = fs::metadata(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => DataError::Missing { file: name.clone() },
            _ => unreadable(error),
        })?;
        if !metadata.is_file() {
            return Err(DataError::Unusable(format!(
                "data path {name} is not a file; set data.path to a file, or to a folder of shards"
            )));
        }
        if metadata.len() == 0 {
            return Err(DataError::Unusable(format!(
                "data file {name} is empty; write it again, or check data.path"
            )));
        }
        let file = File::open(path).map_err(unreadable)?;
        // SAFETY: the map is read-only, and read as plain bytes, for which any value is valid. Another process must not
        // change the file meanwhile, which would be undefined (if it is cut short, this process ends with SIGBUS). As
        // in every program that maps its input, that is left to the user, because locks are advisory.
        let map = unsafe { Mmap::map(&file) }.map_err(unreadable)?;
        Ok(Self {
            name,
            bytes: Bytes::Mapped(map),
        })
    }

    /// The built-in text.
    pub(crate) fn builtin() -> Self {
        Self {
            name: "(built-in text)".to_owned(),
            bytes: Bytes::Owned(builtin::text().into_bytes()),
        }
    }
}

impl Deref for DataFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Mapped(map) => map,
            Bytes::Owned(bytes) => bytes,
        }
    }
}
