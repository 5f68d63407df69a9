//! Buffers for host bytes on their way to the device, and for small readings on their way back.

use super::handles::Event;
use super::{CudaDevice, error};
use crate::{KernelError, READING_BYTES_MAX, READINGS_MAX, Result};
use cudarc::driver::{result::DriverError, sys};
use memory::{Blocks, Space};
use std::cell::Cell;
use std::ptr::NonNull;
use std::rc::Rc;

/// Copies that may run at the same time.
const SLOTS: usize = 16;

/// Bytes of one copy.
const SLOT_BYTES: usize = 1 << 20;

/// Page-locked host memory of every device, outside the ledger.
pub(super) const STAGING_BYTES: u64 =
    (SLOTS * SLOT_BYTES + READINGS_MAX * READING_BYTES_MAX) as u64;

/// A ring of page-locked buffers. The caller may change its bytes as soon as they are in a buffer.
///
/// A buffer is used again after the copy from it, which its event tells. So the processor runs at most [`SLOTS`] copies
/// ahead of the device, and waits for nothing else.
pub(super) struct Staging {
    device: Rc<CudaDevice>,
    bytes: NonNull<u8>,
    copied: Vec<Event>,
    next: Cell<usize>,
    next_reading: Cell<usize>,
}

impl Staging {
    pub(super) fn new(device: &Rc<CudaDevice>) -> Result<Staging> {
        let bytes = device.allocate(Space::Host, STAGING_BYTES);
        let bytes = bytes.map_err(|refused| {
            let error = refused.error.map_or(String::new(), |error| format!(" ({error})"));
            let message = format!(
                "the system refused {STAGING_BYTES} bytes of page-locked memory{error}; look at `ulimit -l` and the \
                 memory limit of the control group"
            );
            KernelError::device("upload", message)
        })?;
        // From here on, dropping it frees the bytes.
        let mut staging = Staging {
            device: device.clone(),
            bytes,
            copied: Vec::new(),
            next: Cell::new(0),
            next_reading: Cell::new(0),
        };
        let created: Result<_, _> = (0..SLOTS).map(|_| Event::new()).collect();
        staging.copied = created.map_err(error::of_driver("upload"))?;
        Ok(staging)
    }

    /// Where the next reading goes: places after the slots, in turn.
    pub(super) fn reading(&self) -> *mut u8 {
        let next = self.next_reading.get();
        self.next_reading.set((next + 1) % READINGS_MAX);
        let offset = SLOTS * SLOT_BYTES + next * READING_BYTES_MAX;
        self.bytes.as_ptr().wrapping_add(offset)
    }

    /// Copies bytes to the device in the order of its stream.
    ///
    /// # Safety
    /// `to` starts as many bytes on the device.
    pub(super) unsafe fn copy(&self, to: *mut u8, bytes: &[u8]) -> Result {
        for (index, chunk) in bytes.chunks(SLOT_BYTES).enumerate() {
            let to = to.wrapping_add(index * SLOT_BYTES);
            let slot = self.next.replace((self.next.get() + 1) % SLOTS);
            self.device.streams.come(&self.copied[slot], "upload")?;
            // SAFETY: the caller's promise, for a part of the bytes; the slot is free.
            let copied = unsafe { self.copy_chunk(slot, to, chunk) };
            copied.map_err(error::of_driver("upload"))?;
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Staging::copy`]; at most a slot's bytes, and the slot's event has come.
    unsafe fn copy_chunk(&self, slot: usize, to: *mut u8, chunk: &[u8]) -> Result<(), DriverError> {
        let stream = self.device.stream;
        // SAFETY: the slot lies within the ring, and nothing copies out of it since its event has come; the copy
        // reads no more than was written; the device lives as long as `self`.
        unsafe {
            let from = self.bytes.as_ptr().add(slot * SLOT_BYTES);
            from.copy_from_nonoverlapping(chunk.as_ptr(), chunk.len());
            sys::cuMemcpyHtoDAsync_v2(to as u64, from.cast(), chunk.len(), stream).result()?;
        }
        self.copied[slot].record(stream)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`; `free` waits for the copies under way.
        unsafe { self.device.free(Space::Host, self.bytes) };
    }
}
