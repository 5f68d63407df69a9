//! A scratch file.

use crate::ScratchError;
use crate::alignment::{AlignedBytes, Alignment, BLOCK_BYTES};
use crate::engine::Engine;
use crate::lock::FolderLock;
use crate::space::room;
use crate::transfer::{DEPTH, PIECE_BYTES, Transfer, Way};
use kernels::BlockFile;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// How files are read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// What carries it out; none: the fastest that the system allows.
    pub engine: Option<Engine>,
    /// Past the page cache, where the file system can do that. Otherwise through it, and its pages are given back.
    pub direct: bool,
}

impl Default for Access {
    fn default() -> Access {
        Access {
            engine: None,
            direct: true,
        }
    }
}

/// A file of fixed size that is removed when it is dropped.
///
/// Any offsets and numbers of bytes can be read and written, from any memory. Past the page cache those that are
/// multiples of a disk's block, 4096 at the most, go the short way; what is not is copied once more. Bytes that are
/// written while others read or write them are whatever the disk makes of that.
#[derive(Debug)]
pub struct ScratchFile {
    path: PathBuf,
    file: File,
    engine: Engine,
    is_direct: bool,
    alignment: Alignment,
    bytes: u64,
    /// Held while a block is read, changed in part and written: two such blocks may be the same.
    partial: Mutex<()>,
    _folder: Arc<FolderLock>,
}

/// What passes through memory of our own at a time.
const BOUNCE_BYTES: usize = 8 * PIECE_BYTES;

/// What is in the page cache at most, where there is no way past it.
const CACHED_BYTES: usize = 2 * DEPTH * PIECE_BYTES;

impl ScratchFile {
    pub(crate) fn create(
        path: PathBuf,
        bytes: u64,
        access: Access,
        folder: Arc<FolderLock>,
    ) -> Result<ScratchFile, ScratchError> {
        let failed = |error| ScratchError::File {
            path: path.clone(),
            error,
        };
        let whole_blocks = bytes.div_ceil(BLOCK_BYTES as u64) * BLOCK_BYTES as u64;
        let engine = Engine::choose(access.engine).map_err(failed)?;
        let (file, is_direct) = open(&path, access.direct).map_err(failed)?;
        let alignment = match is_direct {
            true => Alignment::of(&file),
            false => Alignment::NONE,
        };
        // From here on, the file goes when this is dropped.
        let file = ScratchFile {
            path,
            file,
            engine,
            is_direct,
            alignment,
            bytes: whole_blocks,
            partial: Mutex::default(),
            _folder: folder,
        };
        file.reserve()?;
        Ok(file)
    }

    /// What carries reads and writes out.
    pub fn engine(&self) -> Engine {
        self.engine
    }

    /// Whether they go past the page cache.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Sets the whole file's room aside.
    fn reserve(&self) -> Result<(), ScratchError> {
        let bytes = self.bytes;
        let failed = |error| ScratchError::File {
            path: self.path.clone(),
            error,
        };
        let full = |free| ScratchError::Full {
            path: self.path.clone(),
            needed: bytes,
            free,
        };
        // Looked at first: a file that does not fit would fill the disk before it is refused.
        let free = room(&self.path).map_err(failed)?;
        if bytes > free {
            return Err(full(free));
        }
        if bytes == 0 {
            return Ok(());
        }
        let reserve = || {
            // SAFETY: the file is open.
            let refused =
                unsafe { libc::fallocate(self.file.as_raw_fd(), 0, 0, bytes as i64) } != 0;
            refused.then(io::Error::last_os_error)
        };
        let is_interrupted = |error: &Option<io::Error>| {
            error.as_ref().map(io::Error::kind) == Some(ErrorKind::Interrupted)
        };
        let mut refused = reserve();
        while is_interrupted(&refused) {
            refused = reserve();
        }
        match refused {
            None => Ok(()),
            Some(error) if error.kind() == ErrorKind::StorageFull => Err(full(free)),
            // The file system sets nothing aside: what is free now has to do.
            Some(error) if error.kind() == ErrorKind::Unsupported => {
                self.file.set_len(bytes).map_err(failed)
            }
            Some(error) => Err(failed(error)),
        }
    }

    /// # Safety
    /// As for [`Engine::copy`].
    unsafe fn copy(&self, way: Way, piece: Transfer) -> io::Result<()> {
        let fits = piece.offset.checked_add(piece.bytes as u64);
        if fits.is_none_or(|end| end > self.bytes) {
            let message = format!("the file has {} bytes", self.bytes);
            return Err(io::Error::new(ErrorKind::InvalidInput, message));
        }
        if !self.is_direct {
            // SAFETY: the caller's promise.
            return unsafe { self.copy_cached(way, piece) };
        }
        let Alignment { memory, offset } = self.alignment;
        let head = (piece.offset.next_multiple_of(offset as u64) - piece.offset) as usize;
        let head = head.min(piece.bytes);
        let middle = (piece.bytes - head) / offset * offset;
        let [first, rest] = split(piece, head);
        let [second, third] = split(rest, middle);
        // SAFETY: the caller's promise, for each part.
        unsafe {
            self.copy_through(way, first)?;
            match second.memory.addr().is_multiple_of(memory) {
                true => self.engine.copy(&self.file, way, second)?,
                false => self.copy_through(way, second)?,
            }
            self.copy_through(way, third)
        }
    }

    /// Copies by way of memory of our own, whole blocks at a time: of a block that is written in part, the rest is read
    /// before.
    ///
    /// # Safety
    /// As for [`Engine::copy`].
    unsafe fn copy_through(&self, way: Way, mut piece: Transfer) -> io::Result<()> {
        if piece.bytes == 0 {
            return Ok(());
        }
        let block = self.alignment.offset as u64;
        let bounce = AlignedBytes::new(BOUNCE_BYTES.min(piece.bytes) + 2 * BLOCK_BYTES);
        let one_at_a_time = self.partial.lock();
        let _one_at_a_time = one_at_a_time.unwrap_or_else(PoisonError::into_inner);
        while piece.bytes > 0 {
            let [part, rest] = split(piece, piece.bytes.min(BOUNCE_BYTES));
            let before = part.offset % block;
            let end = (part.offset + part.bytes as u64).next_multiple_of(block);
            let whole = Transfer {
                offset: part.offset - before,
                memory: bounce.pointer(),
                bytes: (end - part.offset + before) as usize,
            };
            let is_whole = part.bytes == whole.bytes;
            // SAFETY: the caller's promise; the bounce is ours, and as large as a part and the blocks at its ends.
            unsafe {
                let inside = bounce.pointer().add(before as usize);
                if way == Way::Read || !is_whole {
                    self.engine.copy(&self.file, Way::Read, whole)?;
                }
                match way {
                    Way::Read => part.memory.copy_from_nonoverlapping(inside, part.bytes),
                    Way::Write => {
                        inside.copy_from_nonoverlapping(part.memory, part.bytes);
                        self.engine.copy(&self.file, Way::Write, whole)?;
                    }
                }
            }
            piece = rest;
        }
        Ok(())
    }

    /// Copies by way of the page cache, and gives its pages back.
    ///
    /// # Safety
    /// As for [`Engine::copy`].
    unsafe fn copy_cached(&self, way: Way, mut piece: Transfer) -> io::Result<()> {
        while piece.bytes > 0 {
            let [part, rest] = split(piece, piece.bytes.min(CACHED_BYTES));
            // SAFETY: the caller's promise.
            unsafe { self.engine.copy(&self.file, way, part)? };
            if way == Way::Write {
                self.file.sync_data()?;
            }
            // Pages that are cut at an end would be kept: the blocks around them go too.
            let start = part.offset / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
            let end = part.offset + part.bytes as u64;
            let end = end.next_multiple_of(BLOCK_BYTES as u64);
            let (start, bytes) = (start as i64, (end - start) as i64);
            // SAFETY: the file is open. It is advice: where it is not taken, pages go when memory is short.
            unsafe {
                let advice = libc::POSIX_FADV_DONTNEED;
                libc::posix_fadvise(self.file.as_raw_fd(), start, bytes, advice);
            }
            piece = rest;
        }
        Ok(())
    }
}

/// The first so many bytes of a piece, and the rest.
fn split(piece: Transfer, bytes: usize) -> [Transfer; 2] {
    [Transfer { bytes, ..piece }, piece.after(bytes)]
}

/// A new file, past the page cache if that is asked for and the file system can do it.
fn open(path: &Path, direct: bool) -> io::Result<(File, bool)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true);
    if direct {
        match options.clone().custom_flags(libc::O_DIRECT).open(path) {
            Err(error) if error.kind() == ErrorKind::InvalidInput => {
                // Some file systems make the file before they refuse the flag.
                let _ = fs::remove_file(path);
            }
            opened => return Ok((opened?, true)),
        }
    }
    let file = options.open(path)?;
    // SAFETY: the file is open. It is advice: pages that are read ahead would stay behind those that are given back.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
    Ok((file, false))
}

impl Drop for ScratchFile {
    fn drop(&mut self) {
        // What cannot be removed now, the next run of the folder removes.
        let _ = fs::remove_file(&self.path);
    }
}

impl BlockFile for ScratchFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let piece = Transfer {
            offset,
            memory: bytes.as_mut_ptr(),
            bytes: bytes.len(),
        };
        // SAFETY: the slice is borrowed until this returns, and by then nothing is under way.
        unsafe { self.copy(Way::Read, piece) }
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let piece = Transfer {
            offset,
            memory: bytes.as_ptr().cast_mut(),
            bytes: bytes.len(),
        };
        // SAFETY: as above; the memory of a write is read alone.
        unsafe { self.copy(Way::Write, piece) }
    }
}
