//! All operations of a save on a disk.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::Path;

/// The operations on a disk of code that must survive a power cut. Contract: the bytes of a file are safe once
/// [`OutFile::sync`] returned. A name that was made, changed or removed is safe once [`Self::sync_folder`] of its
/// folder returned. After a power cut before that, the change may be there or not, and a file may have only part of its
/// bytes.
pub trait FileSystem: Send + Sync {
    /// Makes a folder in one that exists.
    ///
    /// # Errors
    /// The system's error; [`ErrorKind::AlreadyExists`] if the name is taken.
    fn create_folder(&self, path: &Path) -> io::Result<()>;
    /// Makes a file, or empties it.
    ///
    /// # Errors
    /// The system's error.
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn OutFile>>;
    /// Renames a file or folder atomically. It replaces a file with the new name, or an empty folder; a folder that is
    /// not empty is an error.
    ///
    /// # Errors
    /// The system's error.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    ///
    /// # Errors
    /// The system's error.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes an empty folder.
    ///
    /// # Errors
    /// The system's error.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;
    /// Makes the names in a folder durable.
    ///
    /// # Errors
    /// The system's error.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;
    /// The entries of a folder, by name.
    ///
    /// # Errors
    /// The system's error; [`ErrorKind::NotFound`] if there is none.
    fn list(&self, path: &Path) -> io::Result<Vec<FolderEntry>>;
}

/// A file that is being written.
pub trait OutFile: Write + Send {
    /// Makes what was written durable.
    ///
    /// # Errors
    /// The system's error.
    fn sync(&mut self) -> io::Result<()>;
}

/// A name in a folder.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct FolderEntry {
    /// The name, without the folder's.
    pub name: String,
    /// Whether it is a folder itself (a link is not).
    pub is_folder: bool,
}

/// Removes a file, or a folder with all that is in it.
///
/// # Errors
/// The system's error. Part of the folder may be removed by then.
pub fn remove_tree(disk: &dyn FileSystem, path: &Path) -> io::Result<()> {
    for entry in disk.list(path)? {
        let path = path.join(entry.name);
        match entry.is_folder {
            true => remove_tree(disk, &path)?,
            false => disk.remove_file(&path)?,
        }
    }
    disk.remove_folder(path)
}

/// Whether an operation failed for want of room: a full disk, a quota, or a limit on the sizes of files.
pub fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge
    )
}

/// The real file system.
#[derive(Debug, Clone, Copy, Default)]
pub struct Disk;

impl FileSystem for Disk {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn OutFile>> {
        Ok(Box::new(File::create(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        match File::open(path)?.sync_all() {
            // Some network file systems cannot sync a folder.
            Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(()),
            done => done,
        }
    }

    fn list(&self, path: &Path) -> io::Result<Vec<FolderEntry>> {
        let mut entries = fs::read_dir(path)?
            .map(|entry| {
                let entry = entry?;
                Ok(FolderEntry {
                    name: entry.file_name().to_string_lossy().into_owned(),
                    is_folder: entry.file_type()?.is_dir(),
                })
            })
            .collect::<io::Result<Vec<_>>>()?;
        entries.sort();
        Ok(entries)
    }
}

impl OutFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}
