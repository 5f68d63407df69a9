//! Allows one run at a time in a folder, and one command at a time that writes a model into it.

use files::{LockedFile, NotLocked};
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

/// Keeps other trainers out of a run's folder until it is dropped, or until the process ends in any way.
///
/// It locks `RUN/.lock`. The file stays behind, and means nothing without the lock. On a file system without locks,
/// other trainers are not kept out.
#[derive(Debug)]
pub struct RunLock {
    _file: LockedFile,
}

/// The file that [`ModelLock`] locks.
pub const MODEL_LOCK: &str = ".model.lock";

/// Keeps other commands from writing a model into a folder until it is dropped, or until the process ends in any way.
///
/// It locks [`MODEL_LOCK`], and removes that file when it is dropped. A lock file left by a killed
/// process does not block anyone. On a file system without locks, other commands are not kept out.
#[derive(Debug)]
pub struct ModelLock {
    file: LockedFile,
}

/// Why a folder cannot be locked.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum LockError {
    /// Another trainer has locked it.
    #[error(
        "another trainer{holder} is writing into `{}`; wait until it is done, or name another folder with {flag}",
        folder.display()
    )]
    Held {
        folder: PathBuf,
        holder: String,
        flag: &'static str,
    },
    /// The lock's file cannot be written.
    #[error("cannot write `{}`: {error}", path.display())]
    File { path: PathBuf, error: io::Error },
}

impl RunLock {
    /// Locks a run's folder, which must exist.
    ///
    /// # Errors
    /// [`LockError`]. Does not wait.
    pub fn take(run: &Path) -> Result<Self, LockError> {
        let file = lock(run, &run.join(".lock"), "--out")?;
        Ok(Self { _file: file })
    }
}

impl ModelLock {
    /// Locks a folder, which must exist; `flag` names it.
    ///
    /// # Errors
    /// [`LockError`]. Does not wait.
    pub fn take(folder: &Path, flag: &'static str) -> Result<Self, LockError> {
        let file = lock(folder, &folder.join(MODEL_LOCK), flag)?;
        Ok(Self { file })
    }
}

impl Drop for ModelLock {
    fn drop(&mut self) {
        // If this fails, the file left behind blocks no one.
        let _ = self.file.remove();
    }
}

/// Locks a file of a folder, and writes this process's number into it.
fn lock(folder: &Path, path: &Path, flag: &'static str) -> Result<LockedFile, LockError> {
    let failed = |error| LockError::File {
        path: path.into(),
        error,
    };
    let mut locked = LockedFile::take(path).map_err(|error| match error {
        NotLocked::Held(mut file) => LockError::Held {
            folder: folder.into(),
            holder: holder(&mut file),
            flag,
        },
        NotLocked::Failed(error) => failed(error),
    })?;
    let file = &mut locked.file;
    file.set_len(0).map_err(failed)?;
    file.rewind().map_err(failed)?;
    write!(file, "{}", std::process::id()).map_err(failed)?;
    Ok(locked)
}

/// The process that holds the lock, from the file, for people.
fn holder(file: &mut File) -> String {
    let mut text = String::new();
    let number = file
        .take(20)
        .read_to_string(&mut text)
        .ok()
        .and_then(|_| text.parse::<u32>().ok());
    number.map_or(String::new(), |number| format!(" (process {number})"))
}
