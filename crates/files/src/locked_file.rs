//! Files that keep other processes out while they are locked.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A file that this process has locked, until it is dropped or the process ends in any way. The file stays behind.
#[derive(Debug)]
pub struct LockedFile {
    /// The file, for reading and writing. It has the text of an earlier holder.
    pub file: File,
    path: PathBuf,
}

/// Why a file is not locked.
#[derive(Debug)]
pub enum NotLocked {
    /// Another process has locked it. Its text may say which.
    Held(File),
    /// The system's error.
    Failed(io::Error),
}

impl LockedFile {
    /// Locks a file, and makes it if there is none. Does not wait. On a file system without locks, nobody is kept out.
    ///
    /// # Errors
    /// [`NotLocked`].
    pub fn take(path: &Path) -> Result<LockedFile, NotLocked> {
        loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            // Do not follow a link of this name: its target is not ours to write.
            options.custom_flags(libc::O_NOFOLLOW);
            let file = options.open(path).map_err(NotLocked::Failed)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(NotLocked::Held(file)),
                Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => {}
                Err(TryLockError::Error(error)) => return Err(NotLocked::Failed(error)),
            }
            let path = path.into();
            let locked = LockedFile { file, path };
            // The earlier holder may have removed the file between our open and our lock.
            if locked.is_in_place().map_err(NotLocked::Failed)? {
                return Ok(locked);
            }
        }
    }

    /// Removes the file while it is locked. Whoever locks it after that notices that it is gone, and tries again.
    ///
    /// # Errors
    /// The system's error.
    pub fn remove(&self) -> io::Result<()> {
        match self.is_in_place()? {
            true => fs::remove_file(&self.path),
            false => Ok(()),
        }
    }

    /// Whether the locked file still has its name.
    fn is_in_place(&self) -> io::Result<bool> {
        let own = self.file.metadata()?;
        match fs::symlink_metadata(&self.path) {
            Ok(named) => Ok((own.dev(), own.ino()) == (named.dev(), named.ino())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}
