//! A lock that keeps other runs out of a folder.

use crate::ScratchError;
use crate::space::SUFFIX;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A note that says what the folder's files are; it is locked while the run lasts.
pub(crate) const NOTE: &str = "trainer-scratch.txt";

/// The note's line in a folder that a run made. The next run reads it if that one was killed, and removes the folder at its
/// own end.
const MADE: &str = "The folder was made for them, and goes too.\n";

/// Notes are shorter.
const NOTE_BYTES_MAX: u64 = 1000;

/// The lock. Each scratch file has a reference to it, so that it is released last.
#[derive(Debug)]
pub(crate) struct FolderLock {
    path: PathBuf,
    /// Whether this run made the folder, or a killed one whose files were left in it.
    is_made: bool,
    _note: File,
}

impl Drop for FolderLock {
    /// Removes the note while it is locked. Another run that locks it after that notices that it is gone, and tries
    /// again.
    fn drop(&mut self) {
        let _ = fs::remove_file(self.path.join(NOTE));
        if self.is_made {
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
        let mut note = take(&path, &failed)?;
        let is_made = is_new || text(&mut note).contains(MADE.trim_end());
        write_note(&mut note, is_made).map_err(failed)?;
        Ok(FolderLock {
            path,
            is_made,
            _note: note,
        })
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Locks the folder's note, which has the text of a killed run if one was there.
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
            Ok(true) => return Ok(file),
            Ok(false) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
    }
}

fn write_note(file: &mut File, is_made: bool) -> io::Result<()> {
    let process = std::process::id();
    let made = if is_made { MADE } else { "" };
    file.set_len(0)?;
    file.rewind()?;
    write!(
        file,
        "process {process} of trainer keeps optimizer states here while it trains, in files that end in {SUFFIX}.\n\
         They are scratch: they go when it ends, no checkpoint needs them, and when the process is gone, whatever it\n\
         left behind may be removed.\n{made}"
    )
}

/// The note as it is; empty if it cannot be read.
fn text(file: &mut File) -> String {
    let mut text = String::new();
    let _ = file.take(NOTE_BYTES_MAX).read_to_string(&mut text);
    text
}

/// The holder's process, as it wrote it into the note; for messages.
fn holder(file: &mut File) -> String {
    let number = text(file)
        .split_whitespace()
        .nth(1)
        .and_then(|word| word.parse::<u32>().ok());
    number.map_or(String::new(), |number| format!(" (process {number})"))
}
