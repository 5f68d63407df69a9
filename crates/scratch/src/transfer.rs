//! What is copied between memory and a file, and in which parts.

use std::io;

/// Largest part of a read or write that is asked for at a time.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// Pieces that are under way at a time.
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

// SAFETY: whoever makes a piece has the memory for as long as it is copied, and no two pieces share any.
unsafe impl Send for Transfer {}
// SAFETY: as above; a piece is a value that nobody changes while others look at it.
unsafe impl Sync for Transfer {}

impl Transfer {
    /// What is left of it after so many bytes.
    pub(crate) fn after(self, bytes: usize) -> Transfer {
        Transfer {
            offset: self.offset + bytes as u64,
            memory: self.memory.wrapping_add(bytes),
            bytes: self.bytes - bytes,
        }
    }

    /// Its parts of at most [`PIECE_BYTES`].
    pub(crate) fn parts(self) -> impl ExactSizeIterator<Item = Transfer> {
        (0..self.bytes.div_ceil(PIECE_BYTES)).map(move |index| {
            let rest = self.after(index * PIECE_BYTES);
            Transfer {
                bytes: rest.bytes.min(PIECE_BYTES),
                ..rest
            }
        })
    }
}

/// What it means that a system call copied fewer bytes than it was asked for, and can copy no more.
pub(crate) fn fell_short(way: Way) -> io::Error {
    match way {
        Way::Read => io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends before"),
        Way::Write => io::Error::new(io::ErrorKind::WriteZero, "the disk took only a part"),
    }
}
