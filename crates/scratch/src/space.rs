//! Free space of a disk.

use std::ffi::CString;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// How the names of scratch files end.
pub(crate) const SUFFIX: &str = ".trainer-scratch";

/// Bytes that scratch files in a folder may have. If the folder does not exist yet, its nearest parent is asked. Files
/// that a killed run left there count as free, since the next run removes them.
///
/// # Errors
/// [`io::Error`] if the system does not tell.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let left = leftovers(path).unwrap_or_default();
    let bytes = |path: &PathBuf| Some(path.metadata().ok()?.blocks() * 512);
    Ok(room(path)?.saturating_add(left.iter().filter_map(bytes).sum()))
}

/// The disk of a path: the same number for all paths on the same disk.
///
/// # Errors
/// [`io::Error`] if the system does not tell.
pub fn disk_of(path: &Path) -> io::Result<u64> {
    Ok(nearest(path)?.metadata()?.dev())
}

/// The part of a path that exists: itself, or its nearest parent.
fn nearest(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    let there = path.ancestors().find(|path| path.exists());
    Ok(there.unwrap_or(Path::new("/")).into())
}

/// Bytes that may be written on the disk of a path.
pub(crate) fn room(path: &Path) -> io::Result<u64> {
    let there = nearest(path)?;
    let text = CString::new(there.as_os_str().as_bytes())?;
    let mut room = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the text ends in a zero, and the call fills the struct if it succeeds.
    let room = unsafe {
        if libc::statvfs(text.as_ptr(), room.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        room.assume_init()
    };
    if room.f_blocks == 0 {
        // The file system does not tell its size, so no file is refused for lack of space.
        return Ok(u64::MAX);
    }
    // File systems without a limit give numbers whose product overflows u64.
    Ok(room.f_bavail.saturating_mul(room.f_frsize))
}

/// The scratch files in a folder.
pub(crate) fn leftovers(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let is_scratch = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().ends_with(SUFFIX);
    let entries = fs::read_dir(folder)?.collect::<io::Result<Vec<_>>>()?;
    let scratch = entries.into_iter().filter(is_scratch);
    Ok(scratch.map(|entry| entry.path()).collect())
}

#[cfg(test)]
mod tests {
    use super::free_bytes;
    use std::path::Path;

    #[test]
    fn a_folder_that_is_still_to_be_made_has_the_room_of_its_parent() {
        let folder = tempfile::tempdir().unwrap();
        let free = free_bytes(folder.path()).unwrap();
        let later = free_bytes(&folder.path().join("a/b")).unwrap();
        assert!(free > 0 && later > free / 2 && later < free * 2);
        assert!(free_bytes(Path::new("not/made")).unwrap() > 0);
    }

    #[test]
    fn what_a_killed_run_left_is_free() {
        let folder = tempfile::tempdir().unwrap();
        let left = folder.path().join("moments.trainer-scratch");
        std::fs::write(left, vec![1; 32 << 20]).unwrap();
        let (free, room) = (free_bytes(folder.path()), super::room(folder.path()));
        let found = free.unwrap() - room.unwrap();
        // Others write to the disk at the same time.
        assert!(found > 16 << 20, "{found}");
    }
}
