//! Reads and writes by io_uring.

use crate::transfer::{DEPTH, Transfer, Way, fell_short};
use io_uring::{IoUring, Probe, opcode, types};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Idle rings, kept for the next copy: as many as there were copies at the same time.
static IDLE: Mutex<Vec<IoUring>> = Mutex::new(Vec::new());

/// Whether the system has io_uring, and lets this process use it.
pub(crate) fn probe() -> io::Result<()> {
    let ring = IoUring::new(DEPTH as u32)?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let known = [opcode::Read::CODE, opcode::Write::CODE].map(|code| probe.is_supported(code));
    match known {
        [true, true] => Ok(()),
        _ => Err(ErrorKind::Unsupported.into()),
    }
}

/// # Safety
/// As for [`crate::Engine::copy`].
pub(crate) unsafe fn copy(file: &File, way: Way, transfer: Transfer) -> io::Result<()> {
    let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let ring = match idle {
        Some(ring) => ring,
        None => IoUring::new(DEPTH as u32)?,
    };
    let mut copy = Copy {
        ring,
        file,
        way,
        slots: [None; DEPTH],
        under_way: 0,
        failed: None,
    };
    // SAFETY: the caller's promise.
    let copied = unsafe { copy.carry_out(transfer) };
    let ring = copy.ring;
    let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
    idle.push(ring);
    copied
}

/// A copy whose parts are under way.
struct Copy<'a> {
    ring: IoUring,
    file: &'a File,
    way: Way,
    /// What each entry of the ring copies.
    slots: [Option<Transfer>; DEPTH],
    under_way: usize,
    /// The first error, after which no part is begun.
    failed: Option<io::Error>,
}

impl Copy<'_> {
    /// # Safety
    /// As for [`crate::Engine::copy`].
    unsafe fn carry_out(&mut self, transfer: Transfer) -> io::Result<()> {
        let mut parts = transfer.parts();
        loop {
            while self.failed.is_none()
                && let Some(slot) = self.slots.iter().position(Option::is_none)
                && let Some(part) = parts.next()
            {
                // SAFETY: the caller's promise.
                unsafe { self.begin(slot, part) };
            }
            if self.under_way == 0 {
                return self.failed.take().map_or(Ok(()), Err);
            }
            self.wait();
            // SAFETY: the caller's promise.
            unsafe { self.collect() };
        }
    }

    /// Puts a part into the ring, which has an entry for each slot.
    ///
    /// # Safety
    /// As for [`crate::Engine::copy`].
    unsafe fn begin(&mut self, slot: usize, part: Transfer) {
        let (memory, bytes) = (part.memory, part.bytes as u32);
        let file = types::Fd(self.file.as_raw_fd());
        let entry = match self.way {
            Way::Read => opcode::Read::new(file, memory, bytes)
                .offset(part.offset)
                .build(),
            Way::Write => opcode::Write::new(file, memory, bytes)
                .offset(part.offset)
                .build(),
        };
        // SAFETY: the memory stays until the part is done, which `carry_out` waits for; the file is borrowed as long.
        let pushed = unsafe {
            let entry = entry.user_data(slot as u64);
            self.ring.submission().push(&entry)
        };
        pushed.expect("a ring has as many entries as slots, and all entries before were submitted");
        self.slots[slot] = Some(part);
        self.under_way += 1;
    }

    /// Submits what was begun, and waits until something is done.
    fn wait(&mut self) {
        if self.ring.submit_and_wait(1).is_ok() {
            return;
        }
        // Interrupted, or the system is short of something for now. Parts under way still use the memory, so this
        // retries until it succeeds; the pause gives the system time to finish some.
        std::thread::sleep(Duration::from_micros(100));
    }

    /// Collects finished parts, and begins the rest of those that were copied only in part.
    ///
    /// # Safety
    /// As for [`crate::Engine::copy`].
    unsafe fn collect(&mut self) {
        let done: Vec<(usize, i32)> = self
            .ring
            .completion()
            .map(|entry| (entry.user_data() as usize, entry.result()))
            .collect();
        for (slot, result) in done {
            let part = self.slots[slot].take();
            let part = part.expect("what is done was under way");
            self.under_way -= 1;
            let rest = match usize::try_from(result) {
                Ok(0) => Err(fell_short(self.way)),
                Ok(copied) => Ok(part.after(copied)),
                Err(_) => match io::Error::from_raw_os_error(-result) {
                    error if error.kind() == ErrorKind::Interrupted => Ok(part),
                    error if error.kind() == ErrorKind::WouldBlock => Ok(part),
                    error => Err(error),
                },
            };
            match rest {
                // SAFETY: the caller's promise; the slot is free again.
                Ok(rest) if rest.bytes > 0 && self.failed.is_none() => unsafe {
                    self.begin(slot, rest);
                },
                Ok(_) => {}
                Err(error) => {
                    self.failed.get_or_insert(error);
                }
            }
        }
    }
}
