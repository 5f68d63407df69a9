//! Copies bytes to the disk and back, many parts at a time, since a drive is fast only with many requests.

use crate::transfer::{PART_BYTES, Transfer, Way};
use crate::{pool, ring};
use std::fs::File;
use std::io;

/// The mechanism for reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// The system's own queues: io_uring, from one thread.
    Uring,
    /// A few threads, for systems that refuse io_uring, as in many containers.
    Threads,
}

impl Engine {
    /// The requested one, or else the fastest that the system allows.
    pub(crate) fn choose(asked: Option<Engine>) -> io::Result<Engine> {
        match (asked, ring::probe()) {
            (Some(Engine::Threads), _) | (None, Err(_)) => Ok(Engine::Threads),
            (Some(Engine::Uring) | None, Ok(())) => Ok(Engine::Uring),
            (Some(Engine::Uring), Err(error)) => Err(error),
        }
    }

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Engine::Uring => "io_uring",
            Engine::Threads => "threads",
        }
    }

    /// Copies all of a transfer. When it returns, even with an error, nothing is under way.
    ///
    /// # Safety
    /// The transfer's memory is alive, may be written if bytes are read, and nothing else uses it meanwhile.
    pub(crate) unsafe fn copy(self, file: &File, way: Way, transfer: Transfer) -> io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Engine::Uring if transfer.bytes > PART_BYTES => ring::copy(file, way, transfer),
                // A transfer of one part is one system call with either engine.
                Engine::Uring => pool::copy_part(file, way, transfer),
                Engine::Threads => pool::copy(file, way, transfer),
            }
        }
    }
}
