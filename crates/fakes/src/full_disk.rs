//! A disk that runs out of room.

use files::{FileSystem, FolderEntry, OutFile};
use std::io::{self, ErrorKind, Write};
use std::path::Path;
use std::sync::{Arc, Mutex};

/// A file system that becomes full after a number of bytes; otherwise it is the one that it wraps.
pub struct FullDisk<F> {
    disk: F,
    room: Arc<Mutex<u64>>,
}

impl<F: FileSystem> FullDisk<F> {
    /// Leaves room for `bytes`; what is removed does not give any back.
    pub fn new(disk: F, bytes: u64) -> Self {
        Self {
            disk,
            room: Arc::new(Mutex::new(bytes)),
        }
    }
}

struct Limited {
    file: Box<dyn OutFile>,
    room: Arc<Mutex<u64>>,
}

impl Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut room = self.room.lock().expect("no holder panics");
        let fits = (bytes.len() as u64).min(*room) as usize;
        if fits == 0 && !bytes.is_empty() {
            return Err(ErrorKind::StorageFull.into());
        }
        let written = self.file.write(&bytes[..fits])?;
        *room -= written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl OutFile for Limited {
    fn sync(&mut self) -> io::Result<()> {
        self.file.sync()
    }
}

impl<F: FileSystem> FileSystem for FullDisk<F> {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.disk.create_folder(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn OutFile>> {
        Ok(Box::new(Limited {
            file: self.disk.create_file(path)?,
            room: self.room.clone(),
        }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.disk.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.disk.remove_file(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.disk.remove_folder(path)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.disk.sync_folder(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<FolderEntry>> {
        self.disk.list(path)
    }
}
