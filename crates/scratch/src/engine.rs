//! How bytes get to the disk and back: many pieces at a time, which is what makes a drive fast.

use crate::transfer::{PIECE_BYTES, Transfer, Way};
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
    pub(crate) unsafe fn copy(self, file: &File, way: Way, piece: Transfer) -> io::Result<()> {
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
