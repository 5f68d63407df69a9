//! A transfer between memory and a file, and the parts in which it is copied.

use std::io;

/// The most bytes of one system call.
pub(crate) const PART_BYTES: usize = 1 << 20;

/// How many parts are under way at a time.
pub(crate) const DEPTH: usize = 32;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From the file.
    Read,
    /// To it.
    Write,
}

/// Memory and the part of a file that it is copied from or to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    pub(crate) offset: u64,
    pub(crate) memory: *mut u8,
    pub(crate) bytes: usize,
}

// SAFETY: whoever makes a transfer keeps the memory alive while it is copied, and no two transfers share any.
unsafe impl Send for Transfer {}
// SAFETY: as above; a transfer does not change after it is made.
unsafe impl Sync for Transfer {}

impl Transfer {
    /// The transfer without its first `bytes`.
    pub(crate) fn after(self, bytes: usize) -> Transfer {
        Transfer {
            offset: self.offset + bytes as u64,
            memory: self.memory.wrapping_add(bytes),
            bytes: self.bytes - bytes,
        }
    }

    /// Its parts of at most [`PART_BYTES`].
    pub(crate) fn parts(self) -> impl ExactSizeIterator<Item = Transfer> {
        (0..self.bytes.div_ceil(PART_BYTES)).map(move |index| {
            let rest = self.after(index * PART_BYTES);
            Transfer {
                bytes: rest.bytes.min(PART_BYTES),
                ..rest
            }
        })
    }
}

/// The error for a system call that copied fewer bytes than requested and cannot copy more.
pub(crate) fn fell_short(way: Way) -> io::Error {
    match way {
        Way::Read => io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends before"),
        Way::Write => io::Error::new(io::ErrorKind::WriteZero, "the disk took only a part"),
    }
}
