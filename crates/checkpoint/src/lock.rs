//! Allows one run at a time in a folder, and one command at a time that writes a model into it.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Keeps other trainers out of a run's folder until it is dropped, or until the process ends in any way.
///
/// It locks `RUN/.lock`. The file stays behind, and means nothing without the lock. On a file system without locks,
/// other trainers are not kept out.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
}

/// The file that [`ModelLock`] locks.
pub const MODEL_LOCK: &str = ".model.lock";

/// Keeps other commands from writing a model into a folder until it is dropped, or until the process ends in any way.
///
/// It locks [`MODEL_LOCK`], and removes that file when it is dropped. A file that a killed process left means nothing. On a
/// file system without locks, other commands are not kept out.
#[derive(Debug)]
pub struct ModelLock {
    file: File,
    path: PathBuf,
}

/// Why a folder cannot be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another trainer has locked it.
    #[error(
        "another trainer{holder} is writing into `{}`; wait until it is done, or name another folder with {flag}",
        folder.display()
    )]
    Held {
        /// The folder.
        folder: PathBuf,
        /// The other process, if it left its number.
        holder: String,
        /// The flag that names the folder.
        flag: &'static str,
    },
    /// The lock's file cannot be written.
    #[error("cannot write `{}`: {error}", path.display())]
    File {
        /// The lock.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
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
        let path = folder.join(MODEL_LOCK);
        loop {
            let file = lock(folder, &path, flag)?;
            let lock = ModelLock {
                file,
                path: path.clone(),
            };
            // The earlier holder may have removed the file between our open and our lock.
            if lock.is_in_place() {
                return Ok(lock);
            }
        }
    }

    /// Whether the locked file still has its name.
    fn is_in_place(&self) -> bool {
        let named = fs::metadata(&self.path);
        let identity = |file: fs::Metadata| (file.dev(), file.ino());
        let (own, named) = (self.file.metadata().map(identity), named.map(identity));
        own.is_ok_and(|own| named.is_ok_and(|named| own == named))
    }
}

impl Drop for ModelLock {
    fn drop(&mut self) {
        if self.is_in_place() {
            // A file that stays behind means nothing.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Locks a file of a folder, and writes this process's number into it.
fn lock(folder: &Path, path: &Path, flag: &'static str) -> Result<File, LockError> {
    let failed = |error| LockError::File {
        path: path.into(),
        error,
    };
    let options = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path);
    let mut file = options.map_err(failed)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(LockError::Held {
                folder: folder.into(),
                holder: holder(&mut file),
                flag,
            });
        }
        Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => {}
        Err(TryLockError::Error(error)) => return Err(failed(error)),
    }
    file.set_len(0).map_err(failed)?;
    file.rewind().map_err(failed)?;
    write!(file, "{}", std::process::id()).map_err(failed)?;
    Ok(file)
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
