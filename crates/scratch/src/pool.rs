//! Reads and writes by a few threads.

use crate::transfer::{Transfer, Way, fell_short};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads of a copy. They are started for each copy, since that takes only a hundredth of the copy's time.
const THREADS: usize = 8;

/// # Safety
/// As for [`crate::Engine::copy`].
pub(crate) unsafe fn copy(file: &File, way: Way, transfer: Transfer) -> io::Result<()> {
    let parts = transfer.parts();
    let threads = parts.len().min(THREADS);
    let parts: Vec<Transfer> = parts.collect();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
            // SAFETY: the caller's promise; every part is taken once.
            unsafe { copy_part(file, way, *part) }.inspect_err(|_| {
                // After an error no thread begins another part.
                next.store(parts.len(), Ordering::Relaxed);
            })?;
        }
        Ok(())
    };
    if threads <= 1 {
        return work();
    }
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut results = vec![work()];
        let joined = others.into_iter().map(|thread| thread.join());
        results.extend(joined.map(|result| result.expect("a copy never panics")));
        // Wait for all threads, even after an error.
        results.into_iter().collect()
    })
}

/// Copies one part in this thread.
///
/// # Safety
/// As for [`crate::Engine::copy`].
pub(crate) unsafe fn copy_part(file: &File, way: Way, mut part: Transfer) -> io::Result<()> {
    let handle = file.as_raw_fd();
    while part.bytes > 0 {
        let (memory, offset) = (part.memory, part.offset as libc::off_t);
        // SAFETY: the caller's promise.
        let copied = unsafe {
            match way {
                Way::Read => libc::pread(handle, memory.cast(), part.bytes, offset),
                Way::Write => libc::pwrite(handle, memory.cast(), part.bytes, offset),
            }
        };
        match usize::try_from(copied) {
            Ok(0) => return Err(fell_short(way)),
            Ok(copied) => part = part.after(copied),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}
