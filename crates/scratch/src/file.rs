//! A scratch file.

use crate::ScratchError;
use crate::alignment::{AlignedBytes, Alignment, BLOCK_BYTES};
use crate::engine::Engine;
use crate::lock::FolderLock;
use crate::space::room;
use crate::transfer::{DEPTH, PART_BYTES, Transfer, Way};
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
    /// The engine; none: the fastest that the system allows.
    pub engine: Option<Engine>,
    /// Bypass the page cache if the file system can. Otherwise copies go through the cache, and its pages are dropped.
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

/// A file of fixed size that is removed when it is dropped. Any offsets and numbers of bytes can be read and written,
/// from any memory. Past the page cache, multiples of a disk's block (at most 4096 bytes) are copied directly; others
/// are copied once more. If the same bytes are written and at the same time read or written by another call, the result
/// is undefined.
#[derive(Debug)]
pub struct ScratchFile {
    path: PathBuf,
    file: File,
    engine: Engine,
    is_direct: bool,
    alignment: Alignment,
    bytes: u64,
    /// Held while a block is read, changed in part and written back, since two calls may change the same block.
    partial: Mutex<()>,
    _folder: Arc<FolderLock>,
}

/// Bytes that are copied through our own memory at a time.
const BOUNCE_BYTES: usize = 8 * PART_BYTES;

/// Most bytes in the page cache, if it cannot be bypassed.
const CACHED_BYTES: usize = 2 * DEPTH * PART_BYTES;

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
        // From here on, dropping this removes the file.
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

    /// The engine of its reads and writes.
    pub fn engine(&self) -> Engine {
        self.engine
    }

    /// Whether they bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Reserves disk space for the whole file.
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
        // Check the free space first: reserving a file that does not fit would fill the disk before it fails.
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
            // The file system cannot reserve space; rely on what is free now.
            Some(error) if error.kind() == ErrorKind::Unsupported => {
                self.file.set_len(bytes).map_err(failed)
            }
            Some(error) => Err(failed(error)),
        }
    }

    /// # Safety
    /// As for [`Engine::copy`].
    unsafe fn copy(&self, way: Way, transfer: Transfer) -> io::Result<()> {
        let fits = transfer.offset.checked_add(transfer.bytes as u64);
        if fits.is_none_or(|end| end > self.bytes) {
            let message = format!("the file has {} bytes", self.bytes);
            return Err(io::Error::new(ErrorKind::InvalidInput, message));
        }
        if !self.is_direct {
            // SAFETY: the caller's promise.
            return unsafe { self.copy_cached(way, transfer) };
        }
        let Alignment { memory, offset } = self.alignment;
        let head = (transfer.offset.next_multiple_of(offset as u64) - transfer.offset) as usize;
        let head = head.min(transfer.bytes);
        let middle = (transfer.bytes - head) / offset * offset;
        let [first, rest] = split(transfer, head);
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

    /// Copies through our own memory, whole blocks at a time. A block that is written only in part is read first.
    ///
    /// # Safety
    /// As for [`Engine::copy`].
    unsafe fn copy_through(&self, way: Way, mut transfer: Transfer) -> io::Result<()> {
        if transfer.bytes == 0 {
            return Ok(());
        }
        let block = self.alignment.offset as u64;
        let bounce = AlignedBytes::new(BOUNCE_BYTES.min(transfer.bytes) + 2 * BLOCK_BYTES);
        let one_at_a_time = self.partial.lock();
        let _one_at_a_time = one_at_a_time.unwrap_or_else(PoisonError::into_inner);
        while transfer.bytes > 0 {
            let [part, rest] = split(transfer, transfer.bytes.min(BOUNCE_BYTES));
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
            transfer = rest;
        }
        Ok(())
    }

    /// Copies through the page cache, and drops the pages afterwards.
    ///
    /// # Safety
    /// As for [`Engine::copy`].
    unsafe fn copy_cached(&self, way: Way, mut transfer: Transfer) -> io::Result<()> {
        while transfer.bytes > 0 {
            let [part, rest] = split(transfer, transfer.bytes.min(CACHED_BYTES));
            // SAFETY: the caller's promise.
            unsafe { self.engine.copy(&self.file, way, part)? };
            if way == Way::Write {
                self.file.sync_data()?;
            }
            // Pages that are only partly in the range would be kept, so drop whole blocks.
            let start = part.offset / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
            let end = part.offset + part.bytes as u64;
            let end = end.next_multiple_of(BLOCK_BYTES as u64);
            let (start, bytes) = (start as i64, (end - start) as i64);
            // SAFETY: the file is open. This is only advice; if the system ignores it, it drops pages when memory is
            // short.
            unsafe {
                let advice = libc::POSIX_FADV_DONTNEED;
                libc::posix_fadvise(self.file.as_raw_fd(), start, bytes, advice);
            }
            transfer = rest;
        }
        Ok(())
    }
}

/// The first `bytes` of a transfer, and the rest.
fn split(transfer: Transfer, bytes: usize) -> [Transfer; 2] {
    [Transfer { bytes, ..transfer }, transfer.after(bytes)]
}

/// A new file, past the page cache if that is asked for and the file system can do it.
fn open(path: &Path, direct: bool) -> io::Result<(File, bool)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true);
    if direct {
        match options.clone().custom_flags(libc::O_DIRECT).open(path) {
            Err(error) if error.kind() == ErrorKind::InvalidInput => {
                // Some file systems create the file before they refuse the flag.
                let _ = fs::remove_file(path);
            }
            opened => return Ok((opened?, true)),
        }
    }
    let file = options.open(path)?;
    // SAFETY: the file is open. This is only advice: pages that were read ahead would not be dropped.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
    Ok((file, false))
}

impl Drop for ScratchFile {
    fn drop(&mut self) {
        // If this fails, the next run that opens the folder removes the file.
        let _ = fs::remove_file(&self.path);
    }
}

impl BlockFile for ScratchFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let transfer = Transfer {
            offset,
            memory: bytes.as_mut_ptr(),
            bytes: bytes.len(),
        };
        // SAFETY: the slice is borrowed until this returns, and by then nothing is under way.
        unsafe { self.copy(Way::Read, transfer) }
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let transfer = Transfer {
            offset,
            memory: bytes.as_ptr().cast_mut(),
            bytes: bytes.len(),
        };
        // SAFETY: as above; a write only reads the memory.
        unsafe { self.copy(Way::Write, transfer) }
    }
}
