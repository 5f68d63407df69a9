//! A lock that keeps other runs out of a folder.

use crate::ScratchError;
use crate::space::SUFFIX;
use files::{LockedFile, NotLocked};
use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
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
    note: LockedFile,
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        let _ = self.note.remove();
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
        // It has the text of a killed run if one was there.
        let mut note = LockedFile::take(&path.join(NOTE)).map_err(|error| match error {
            NotLocked::Held(mut file) => ScratchError::Held {
                folder: path.clone(),
                holder: holder(&mut file),
            },
            NotLocked::Failed(error) => failed(error),
        })?;
        let is_made = is_new || text(&mut note.file).contains(MADE.trim_end());
        write_note(&mut note.file, is_made).map_err(failed)?;
        Ok(FolderLock {
            path,
            is_made,
            note,
        })
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
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
