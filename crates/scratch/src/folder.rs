//! A folder that one run keeps scratch files in.

use crate::ScratchError;
use crate::engine::Engine;
use crate::file::{Access, ScratchFile};
use crate::space::room;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How the names of scratch files end.
const SUFFIX: &str = ".trainer-scratch";

/// The file that says what the others are, and is locked while the run lasts.
const NOTE: &str = "trainer-scratch.txt";

/// A folder for scratch files, kept from other runs until it and its files are dropped, or the process ends.
///
/// Of a process that was killed the files stay behind. The next run that opens the folder removes them.
#[derive(Clone, Debug)]
pub struct ScratchFolder {
    held: Arc<Held>,
    access: Access,
}

/// The lock. Each file has a share in it, so that it is given up last.
#[derive(Debug)]
pub(crate) struct Held {
    path: PathBuf,
    /// It was made for this run.
    is_new: bool,
    _note: File,
}

impl ScratchFolder {
    /// Makes the folder if it is not there, and takes it.
    ///
    /// # Errors
    /// [`ScratchError`] if another run has it, or it cannot be written. It does not wait.
    pub fn open(path: impl Into<PathBuf>) -> Result<ScratchFolder, ScratchError> {
        ScratchFolder::open_for(path, Access::default())
    }

    /// As [`ScratchFolder::open`], with a say in how files are read and written.
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
        let note = take(&path, &failed)?;
        remove_leftovers(&path).map_err(failed)?;
        let held = Held {
            path,
            is_new,
            _note: note,
        };
        Ok(ScratchFolder {
            held: Arc::new(held),
            access,
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.held.path
    }

    /// Makes a file of so many bytes, all of which the disk has set aside when this returns. They read as 0.
    ///
    /// # Errors
    /// [`ScratchError::Full`] if the disk has too little room, or [`ScratchError::File`].
    pub fn create(&self, name: &str, bytes: u64) -> Result<Arc<ScratchFile>, ScratchError> {
        let path = self.held.path.join(format!("{name}{SUFFIX}"));
        let file = ScratchFile::create(path, bytes, self.access, self.held.clone())?;
        Ok(Arc::new(file))
    }

    /// What is free on its disk.
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

impl Drop for Held {
    /// Removes the note while it is locked, so that whoever takes it next looks whether it is still there.
    fn drop(&mut self) {
        let _ = fs::remove_file(self.path.join(NOTE));
        if self.is_new {
            // Refused where somebody has put something else there.
            let _ = fs::remove_dir(&self.path);
        }
    }
}

/// Locks the folder's note, and writes it.
fn take(folder: &Path, failed: &dyn Fn(io::Error) -> ScratchError) -> Result<File, ScratchError> {
    let path = folder.join(NOTE);
    loop {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        // What a link of this name leads to is not ours to write.
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
            // Where the file system has no locks, nobody is kept out.
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

/// The holder's process, as it wrote it down: for people.
fn holder(file: &mut File) -> String {
    let mut text = String::new();
    let read = file.take(100).read_to_string(&mut text);
    let mut words = text.split_whitespace().skip(1);
    let number = read.ok().and_then(|_| words.next()?.parse::<u32>().ok());
    number.map_or(String::new(), |number| format!(" (process {number})"))
}

/// Removes what a killed process left.
fn remove_leftovers(folder: &Path) -> io::Result<()> {
    leftovers(folder)?.iter().try_for_each(fs::remove_file)
}

/// The scratch files in a folder.
pub(crate) fn leftovers(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let is_scratch = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().ends_with(SUFFIX);
    let entries = fs::read_dir(folder)?.collect::<io::Result<Vec<_>>>()?;
    let scratch = entries.into_iter().filter(is_scratch);
    Ok(scratch.map(|entry| entry.path()).collect())
}
