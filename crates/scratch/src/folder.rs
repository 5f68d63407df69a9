//! A folder in which one run keeps scratch files.

use crate::ScratchError;
use crate::engine::Engine;
use crate::file::{Access, ScratchFile};
use crate::lock::{FolderLock, NOTE};
use crate::space::{SUFFIX, leftovers, room};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A folder for scratch files. Other runs cannot open it until it and its files are dropped, or the process ends. Files
/// of a killed process stay behind. The next run that opens the folder removes them, and at its end the folder too if the
/// killed run made it.
#[derive(Clone, Debug)]
pub struct ScratchFolder {
    lock: Arc<FolderLock>,
    access: Access,
}

impl ScratchFolder {
    /// Makes the folder if it does not exist, and locks it.
    ///
    /// # Errors
    /// [`ScratchError`] if another run has it, or it cannot be written. It does not wait.
    pub fn open(path: impl Into<PathBuf>) -> Result<ScratchFolder, ScratchError> {
        ScratchFolder::open_for(path, Access::default())
    }

    /// As [`ScratchFolder::open`], with a choice of how files are read and written.
    ///
    /// # Errors
    /// As [`ScratchFolder::open`]; also if the system refuses the engine that was asked for.
    pub fn open_for(
        path: impl Into<PathBuf>,
        access: Access,
    ) -> Result<ScratchFolder, ScratchError> {
        let path = path.into();
        let failed = |error| ScratchError::Folder {
            path: path.clone(),
            error,
        };
        let access = Access {
            engine: Some(Engine::choose(access.engine).map_err(failed)?),
            ..access
        };
        let is_new = !path.exists();
        fs::create_dir_all(&path).map_err(failed)?;
        let lock = FolderLock::take(path.clone(), is_new)?;
        leftovers(&path)
            .and_then(|left| left.iter().try_for_each(fs::remove_file))
            .map_err(failed)?;
        Ok(ScratchFolder {
            lock: Arc::new(lock),
            access,
        })
    }

    /// Removes what a killed run left in a folder, and the folder if that run made it. A folder that another run has, or
    /// that none had, stays as it is.
    pub fn sweep(path: &Path) {
        if path.join(NOTE).is_file() {
            // Refused while another run has it.
            drop(ScratchFolder::open(path));
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.lock.path()
    }

    /// Makes a file of `bytes` zero bytes. Its space on the disk is reserved when this returns.
    ///
    /// # Errors
    /// [`ScratchError::Full`] if the disk has too little room, or [`ScratchError::File`].
    pub fn create(&self, name: &str, bytes: u64) -> Result<Arc<ScratchFile>, ScratchError> {
        let path = self.lock.path().join(format!("{name}{SUFFIX}"));
        let file = ScratchFile::create(path, bytes, self.access, self.lock.clone())?;
        Ok(Arc::new(file))
    }

    /// Free bytes on its disk.
    ///
    /// # Errors
    /// [`ScratchError::Folder`] if the system does not tell.
    pub fn free_bytes(&self) -> Result<u64, ScratchError> {
        room(self.path()).map_err(|error| ScratchError::Folder {
            path: self.path().into(),
            error,
        })
    }
}
