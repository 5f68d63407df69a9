//! The folder that a data set is written into until it is complete.

use crate::PrepareError;
use crate::Result;
use data::ListedShard;
use files::{Disk, FileSystem, remove_tree};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

const PREFIX: &str = ".preparing";

/// Keeps other commands out of an unfinished folder while it is locked.
const LOCK: &str = ".lock";

/// A hidden folder, which is removed unless it is published.
///
/// It is beside `out`, and is renamed to it at the end. If `out` exists, it is inside of it instead, because `out` may
/// be a link, a mount point or the current folder, which cannot be replaced by renaming. What a killed command left
/// behind has the same name, so the next command with the same `out` removes it.
pub(crate) struct Unfinished {
    path: PathBuf,
    /// The final folder of the files.
    out: PathBuf,
    is_inside: bool,
    /// The locked file.
    _lock: File,
}

impl Unfinished {
    pub(crate) fn create(out: &Path) -> Result<Unfinished> {
        let failed = || PrepareError::unwritable(out);
        let is_inside = out.is_dir();
        let (path, absolute) = if is_inside {
            let absolute = fs::canonicalize(out).map_err(failed())?;
            (absolute.join(PREFIX), absolute)
        } else {
            let absolute = std::path::absolute(out).map_err(failed())?;
            let name = absolute.file_name().unwrap_or_default().to_string_lossy();
            (
                absolute.with_file_name(format!("{PREFIX}-{name}")),
                absolute,
            )
        };
        fs::create_dir_all(&path).map_err(PrepareError::unwritable(&path))?;
        let lock = lock(&path.join(LOCK)).map_err(PrepareError::unwritable(&path))?;
        let lock = lock.ok_or_else(|| PrepareError::Busy { path: out.into() })?;
        let unfinished = Unfinished {
            path,
            out: absolute,
            is_inside,
            _lock: lock,
        };
        // Another command may have published it in the meantime.
        check_free(out)?;
        for name in unfinished.names().map_err(failed())? {
            let left_behind = unfinished.path.join(name);
            fs::remove_file(&left_behind).map_err(PrepareError::unwritable(&left_behind))?;
        }
        Ok(unfinished)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Renames the folder to `out`, or moves its files there, `dataset.json` last.
    pub(crate) fn publish(&self) -> Result {
        Disk.sync_folder(&self.path)
            .and_then(|()| match self.is_inside {
                true => self.move_files(),
                false => self.rename(),
            })
            .map_err(PrepareError::unwritable(&self.out))
    }

    fn rename(&self) -> io::Result<()> {
        Disk.rename(&self.path, &self.out)?;
        // The lock's file has no meaning by itself.
        let _ = fs::remove_file(self.out.join(LOCK));
        let parent = self.out.parent().unwrap_or(&self.out);
        Disk.sync_folder(parent).inspect_err(|_| {
            let _ = remove_tree(&Disk, &self.out);
        })
    }

    fn move_files(&self) -> io::Result<()> {
        let mut names = self.names()?;
        names.sort_by_key(|name| name == ListedShard::FILE);
        let moved = names
            .iter()
            .try_for_each(|name| Disk.rename(&self.path.join(name), &self.out.join(name)));
        moved
            .and_then(|()| Disk.sync_folder(&self.out))
            .inspect_err(|_| {
                for name in &names {
                    let _ = fs::remove_file(self.out.join(name));
                }
            })
    }

    /// All names except the lock's.
    fn names(&self) -> io::Result<Vec<String>> {
        let entries = Disk.list(&self.path)?.into_iter();
        let names = entries.map(|entry| entry.name);
        Ok(names.filter(|name| name != LOCK).collect())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // If it was published, it does not exist any more.
        let _ = remove_tree(&Disk, &self.path);
    }
}

/// An error unless nothing is at `out`, or an empty folder, or one with only what a killed command left.
pub(crate) fn check_free(out: &Path) -> Result {
    let is_free = match fs::read_dir(out) {
        Ok(entries) => entries
            .flatten()
            .all(|entry| entry.file_name() == PREFIX && entry.path().is_dir()),
        Err(_) => !out.exists() && !out.is_symlink(),
    };
    match is_free {
        true => Ok(()),
        false => Err(PrepareError::OutExists { path: out.into() }),
    }
}

/// The locked file; none if another process has locked it. On a file system without locks, it counts as locked.
fn lock(path: &Path) -> io::Result<Option<File>> {
    let mut options = OpenOptions::new();
    let options = options.write(true).create(true).truncate(false);
    let file = options.open(path)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => Ok(Some(file)),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_is_written_is_left_alone_and_one_left_behind_goes() {
        let place = tempfile::tempdir().unwrap();
        let (out, there) = (place.path().join("out"), place.path().join("there"));
        fs::create_dir(&there).unwrap();
        for out in [out, there] {
            let first = Unfinished::create(&out).unwrap();
            fs::write(first.path().join("a.bin"), "a").unwrap();
            let second = Unfinished::create(&out);
            assert!(matches!(second, Err(PrepareError::Busy { .. })));
            // The state after a signal that cannot be caught has ended a command.
            let left = first.path().to_owned();
            let copy = place.path().join("copy");
            fs::rename(&left, &copy).unwrap();
            drop(first);
            fs::rename(&copy, &left).unwrap();
            let third = Unfinished::create(&out).unwrap();
            assert!(third.names().unwrap().is_empty());
            fs::write(third.path().join("b.bin"), "b").unwrap();
            third.publish().unwrap();
            drop(third);
            let names: Vec<_> = fs::read_dir(&out).unwrap().flatten().collect();
            assert_eq!(names.len(), 1, "{names:?}");
            assert_eq!(names[0].file_name(), "b.bin");
            assert!(matches!(
                check_free(&out),
                Err(PrepareError::OutExists { .. })
            ));
        }
    }
}
