//! Files that the queues of a disk read and write.

use crate::{KernelError, Queue, Result};
use memory::{In, Out};
use std::fmt::Debug;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// A file of fixed size. Several threads read and write its blocks at a time.
pub trait BlockFile: Send + Sync + Debug {
    /// The path that errors show.
    fn path(&self) -> &Path;

    /// Reads the file from `offset` on into `bytes`.
    ///
    /// # Errors
    /// [`io::Error`] if the system fails, or the file ends too early.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// Writes `bytes` to the file from `offset` on.
    ///
    /// # Errors
    /// [`io::Error`] if the system fails, or takes fewer bytes.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

/// The file of a step on shapes: it has a name but no contents.
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

/// A copy between pinned host memory and a file.
pub struct DiskCopy<'a> {
    /// The file.
    pub file: Arc<dyn BlockFile>,
    /// The offset in the file.
    pub offset: u64,
    /// The host memory.
    pub host: HostSide<'a>,
}

/// The host memory of a [`DiskCopy`]; it is contiguous.
pub enum HostSide<'a> {
    /// The memory that a read fills.
    Read(Out<'a>),
    /// The memory that a write takes its bytes from.
    Write(In<'a>),
}

impl DiskCopy<'_> {
    /// The queue that the copy belongs to.
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

    /// The same copy without its lifetime.
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

    /// Makes the copy in this thread.
    ///
    /// # Safety
    /// The processor can reach the memory, and the promises of [`crate::Kernels::start_disk_read`] hold.
    ///
    /// # Errors
    /// [`KernelError`] of the disk, if the file cannot be read or written.
    pub unsafe fn carry_out(self) -> Result {
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
