//! A lock that keeps other runs out of a folder.

use crate::ScratchError;
use crate::space::SUFFIX;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A note that says what the folder's files are; it is locked while the run lasts.
const NOTE: &str = "trainer-scratch.txt";

/// The lock. Each scratch file has a reference to it, so that it is released last.
#[derive(Debug)]
pub(crate) struct FolderLock {
    path: PathBuf,
    /// Whether this run made the folder.
    is_new: bool,
    _note: File,
}

impl Drop for FolderLock {
    /// Removes the note while it is locked. Another run that locks it after that notices that it is gone, and tries
    /// again.
    fn drop(&mut self) {
        let _ = fs::remove_file(self.path.join(NOTE));
        if self.is_new {
            // Fails if the folder has other files.
            let _ = fs::remove_dir(&self.path);
        }
    }
}

impl FolderLock {
    /// Takes the lock of a folder, which must exist.
    pub(crate) fn take(path: PathBuf, is_new: bool) -> Result<FolderLock, ScratchError> {
        let failed = |error| ScratchError::Folder {
            path: path.clone(),
            error,
        };
        let note = take(&path, &failed)?;
        Ok(FolderLock {
            path,
            is_new,
            _note: note,
        })
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Locks the folder's note, and writes it.
fn take(folder: &Path, failed: &dyn Fn(io::Error) -> ScratchError) -> Result<File, ScratchError> {
    let path = folder.join(NOTE);
    loop {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        // Do not follow a link of this name: its target is not ours to write.
        options.custom_flags(libc::O_NOFOLLOW);
        let mut file = options.open(&path).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(ScratchError::Held {
                    folder: folder.into(),
                    holder: holder(&mut file),
                });
            }
            // If the file system has no locks, other runs are not kept out.
            Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => {}
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        // The run before may have removed it between the opening and the lock.
        let same = |found: fs::Metadata| Ok(found.ino() == file.metadata()?.ino());
        match fs::metadata(&path).and_then(same) {
            Ok(true) => {
                write_note(&mut file).map_err(failed)?;
                return Ok(file);
            }
            Ok(false) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
    }
}

fn write_note(file: &mut File) -> io::Result<()> {
    let process = std::process::id();
    file.set_len(0)?;
    file.rewind()?;
    write!(
        file,
        "process {process} of trainer keeps optimizer states here while it trains, in files that end in {SUFFIX}.\n\
         They are scratch: they go when it ends, no checkpoint needs them, and when the process is gone, whatever it\n\
         left behind may be removed.\n"
    )
}

/// The holder's process, as it wrote it into the note; for messages.
fn holder(file: &mut File) -> String {
    let mut text = String::new();
    let read = file.take(100).read_to_string(&mut text);
    let mut words = text.split_whitespace().skip(1);
    let number = read.ok().and_then(|_| words.next()?.parse::<u32>().ok());
    number.map_or(String::new(), |number| format!(" (process {number})"))
}
