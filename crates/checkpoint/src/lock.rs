//! Allows one run at a time in a folder.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};

/// Keeps other trainers out of a run's folder until it is dropped, or until the process ends in any way.
///
/// It locks `RUN/.lock`. The file stays behind, and means nothing without the lock. On a file system without locks,
/// other trainers are not kept out.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
}

/// Why a run's folder cannot be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another trainer has locked it.
    #[error(
        "another trainer{holder} is writing into `{}`; wait until it is done, or give this run a folder of its own by --out",
        run.display()
    )]
    Held {
        /// The run's folder.
        run: PathBuf,
        /// The other process, if it left its number.
        holder: String,
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
        let path = run.join(".lock");
        let failed = |error| LockError::File {
            path: path.clone(),
            error,
        };
        let options = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path);
        let mut file = options.map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(LockError::Held {
                    run: run.into(),
                    holder: holder(&mut file),
                });
            }
            Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => {}
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        file.set_len(0).map_err(failed)?;
        file.rewind().map_err(failed)?;
        write!(file, "{}", std::process::id()).map_err(failed)?;
        Ok(Self { _file: file })
    }
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
