//! Files whose size and checksum are computed while they are written.

use crate::{CHUNK_BYTES, FileSystem, FilesError, OutFile};
use serde::{Deserialize, Serialize};
use std::io::{self, Write};
use std::path::Path;

/// A file that was written and made durable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenFile {
    /// Its name, without the folder's.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// CRC-32 (that of gzip and PNG) of its bytes.
    pub crc32: u32,
}

/// Writes a file and makes its bytes durable; its name is durable after [`FileSystem::sync_folder`].
///
/// # Errors
/// [`FilesError::File`].
pub fn write_file(
    disk: &dyn FileSystem,
    folder: &Path,
    name: &str,
    bytes: &[u8],
) -> Result<WrittenFile, FilesError> {
    let path = folder.join(name);
    let failed = || FilesError::at("write", &path);
    let mut out = Hashed::create(disk, &path).map_err(failed())?;
    out.write_all(bytes).map_err(failed())?;
    out.finish(name).map_err(failed())
}

/// A file, with the size and the checksum of what was written so far.
pub(crate) struct Hashed {
    file: Box<dyn OutFile>,
    pub(crate) bytes: u64,
    crc32: crc32fast::Hasher,
}

impl Hashed {
    pub(crate) fn create(disk: &dyn FileSystem, path: &Path) -> io::Result<Self> {
        Ok(Self {
            file: disk.create_file(path)?,
            bytes: 0,
            crc32: crc32fast::Hasher::new(),
        })
    }

    pub(crate) fn finish(mut self, name: &str) -> io::Result<WrittenFile> {
        self.file.flush()?;
        self.file.sync()?;
        Ok(WrittenFile {
            name: name.into(),
            bytes: self.bytes,
            crc32: self.crc32.finalize(),
        })
    }
}

impl Write for Hashed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Few enough bytes to be still in the processor's caches when they are hashed.
        let bytes = &bytes[..bytes.len().min(CHUNK_BYTES)];
        let written = self.file.write(bytes)?;
        self.crc32.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
