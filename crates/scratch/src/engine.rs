//! How bytes get to the disk and back: many pieces at a time, which is what makes a drive fast.

use crate::{pool, ring};
use std::fs::File;
use std::io;

/// What carries reads and writes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// The system's own queues: io_uring, from one thread.
    Uring,
    /// A few threads, where the system refuses those, as in many containers.
    Threads,
}

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
pub(crate) struct Piece {
    pub(crate) offset: u64,
    pub(crate) memory: *mut u8,
    pub(crate) bytes: usize,
}

// SAFETY: whoever makes a piece has the memory for as long as it is copied, and no two pieces share any.
unsafe impl Send for Piece {}
// SAFETY: as above; a piece is a value that nobody changes while others look at it.
unsafe impl Sync for Piece {}

impl Piece {
    /// What is left of it after so many bytes.
    pub(crate) fn after(self, bytes: usize) -> Piece {
        Piece {
            offset: self.offset + bytes as u64,
            memory: self.memory.wrapping_add(bytes),
            bytes: self.bytes - bytes,
        }
    }

    /// Its parts of at most [`PIECE_BYTES`].
    pub(crate) fn parts(self) -> impl ExactSizeIterator<Item = Piece> {
        (0..self.bytes.div_ceil(PIECE_BYTES)).map(move |index| {
            let rest = self.after(index * PIECE_BYTES);
            Piece {
                bytes: rest.bytes.min(PIECE_BYTES),
                ..rest
            }
        })
    }
}

impl Engine {
    /// The one that was asked for, or else the fastest that the system allows.
    pub(crate) fn choose(asked: Option<Engine>) -> io::Result<Engine> {
        match (asked, ring::probe()) {
            (Some(Engine::Threads), _) | (None, Err(_)) => Ok(Engine::Threads),
            (Some(Engine::Uring) | None, Ok(())) => Ok(Engine::Uring),
            (Some(Engine::Uring), Err(error)) => Err(error),
        }
    }

    /// What people call it.
    pub fn name(self) -> &'static str {
        match self {
            Engine::Uring => "io_uring",
            Engine::Threads => "threads",
        }
    }

    /// Copies all of a piece. When it returns nothing is under way, also after an error.
    ///
    /// # Safety
    /// The piece's memory is there, may be written if bytes are read, and nobody else uses it meanwhile.
    pub(crate) unsafe fn copy(self, file: &File, way: Way, piece: Piece) -> io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Engine::Uring if piece.bytes > PIECE_BYTES => ring::copy(file, way, piece),
                // One piece is one call, whatever carries it out.
                Engine::Uring => pool::copy_part(file, way, piece),
                Engine::Threads => pool::copy(file, way, piece),
            }
        }
    }
}

/// What it means that a system call copied fewer bytes than it was asked for, and can copy no more.
pub(crate) fn fell_short(way: Way) -> io::Error {
    match way {
        Way::Read => io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends before"),
        Way::Write => io::Error::new(io::ErrorKind::WriteZero, "the disk took only a part"),
    }
}
