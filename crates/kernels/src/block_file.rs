//! What a queue of a disk reads and writes.

use crate::{KernelError, Queue};
use memory::{In, Out};
use std::fmt::Debug;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// A file of fixed size that is read and written in blocks, by several threads at a time.
pub trait BlockFile: Send + Sync + Debug {
    /// What errors call it.
    fn path(&self) -> &Path;

    /// Fills `bytes` with what the file has from `offset` on.
    ///
    /// # Errors
    /// [`io::Error`] if the system cannot, or the file ends before.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// Replaces what the file has from `offset` on.
    ///
    /// # Errors
    /// [`io::Error`] if the system cannot, or takes fewer bytes.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

/// The file of a step on shapes: it has a name, and there is nothing in it.
#[derive(Debug)]
pub struct NoFile;

impl BlockFile for NoFile {
    fn path(&self) -> &Path {
        Path::new("(no file)")
    }

    fn read_at(&self, _offset: u64, _bytes: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn write_at(&self, _offset: u64, _bytes: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Bytes between pinned host memory and a file.
pub struct DiskCopy<'a> {
    /// The file.
    pub file: Arc<dyn BlockFile>,
    /// Where in it.
    pub offset: u64,
    /// The other side.
    pub host: HostSide<'a>,
}

/// The side of a [`DiskCopy`] that is memory; it is contiguous.
pub enum HostSide<'a> {
    /// What is read into.
    Read(Out<'a>),
    /// What is written.
    Write(In<'a>),
}

impl DiskCopy<'_> {
    /// The queue that it belongs to.
    pub fn queue(&self) -> Queue {
        match self.host {
            HostSide::Read(_) => Queue::DiskRead,
            HostSide::Write(_) => Queue::DiskWrite,
        }
    }

    /// The number of bytes.
    pub fn bytes(&self) -> usize {
        match &self.host {
            HostSide::Read(out) => out.bytes(),
            HostSide::Write(x) => x.bytes(),
        }
    }

    /// The same copy, for as long as one likes.
    ///
    /// # Safety
    /// As for [`Out::outliving`].
    pub unsafe fn outliving(self) -> DiskCopy<'static> {
        // SAFETY: the caller's promise.
        let host = unsafe {
            match self.host {
                HostSide::Read(out) => HostSide::Read(out.outliving()),
                HostSide::Write(x) => HostSide::Write(x.outliving()),
            }
        };
        DiskCopy {
            file: self.file,
            offset: self.offset,
            host,
        }
    }

    /// Copies, in this thread.
    ///
    /// # Safety
    /// The memory can be reached, and is as [`crate::Kernels::start_disk_read`] asks for.
    ///
    /// # Errors
    /// [`KernelError`] of the disk, if the file cannot be read or written.
    pub unsafe fn carry_out(self) -> Result<(), KernelError> {
        let bytes = self.bytes();
        // SAFETY: a contiguous view covers as many bytes, and the caller promises that they are there, and this copy's.
        let (operation, verb, done) = unsafe {
            match &self.host {
                HostSide::Read(out) => {
                    let out = std::slice::from_raw_parts_mut(out.pointer(), bytes);
                    let done = self.file.read_at(self.offset, out);
                    ("disk_read", "read", done)
                }
                HostSide::Write(x) => {
                    let x = std::slice::from_raw_parts(x.pointer(), bytes);
                    let done = self.file.write_at(self.offset, x);
                    ("disk_write", "write", done)
                }
            }
        };
        done.map_err(|error| {
            let (path, offset) = (self.file.path().display(), self.offset);
            let message = format!("cannot {verb} {bytes} bytes at {offset} of {path}: {error}");
            KernelError::disk(operation, message)
        })
    }
}
