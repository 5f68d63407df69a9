//! What a device offers a memory: blocks.

use crate::{Place, Space};
use serde::Serialize;
use std::ptr::NonNull;
use std::rc::Rc;
use std::time::Duration;

/// A device's memory, handed out in few, large blocks.
///
/// Blocks come and go between steps: a new one is zero when it is handed out, for whatever queue of the device, and one is
/// taken back when all work that was asked for before is done.
pub trait Blocks {
    /// What a person calls the device: `CUDA`.
    fn device(&self) -> &'static str;

    /// A zeroed block of `bytes`, a multiple of the granularity and more than 0: in the device's memory, which the
    /// processor cannot read, or in page-locked host memory, which it can.
    ///
    /// # Errors
    /// [`Refused`] if there is no room.
    fn allocate(&self, space: Space, bytes: u64) -> Result<NonNull<u8>, Refused>;

    /// Takes a block back: never while calls that were asked for are kept back, to be made as one.
    ///
    /// # Safety
    /// `block` comes from [`Blocks::allocate`] with this `space`, and is used by nothing that is asked for later.
    unsafe fn free(&self, space: Space, block: NonNull<u8>);

    /// Sets `bytes` bytes of device memory to `value`.
    ///
    /// # Safety
    /// `pointer` starts as many bytes of a live block, which nothing else uses.
    unsafe fn fill(&self, pointer: *mut u8, value: u8, bytes: u64);

    /// Marks and counts from here.
    fn reset_marks(&self) {}

    /// What the device saw since [`Blocks::reset_marks`].
    fn marks(&self) -> DeviceMarks {
        DeviceMarks::default()
    }

    /// Stamps the stream: the time at which all work that was asked for before is done. It does not wait. Nothing if
    /// the device refuses, after a failure.
    fn stamp(&self) -> Option<Stamp> {
        None
    }

    /// The device's time from one stamp to a later one, for which it waits. Nothing if earlier work failed.
    fn elapsed(&self, _from: Stamp, _to: Stamp) -> Option<Duration> {
        None
    }

    /// Takes a stamp back, to be put into the stream again.
    fn give_back_stamp(&self, _stamp: Stamp) {}

    /// A place has been entered: for profilers.
    fn enter(&self, _place: Place) {}

    /// The place that was entered last has been left: for profilers.
    fn leave(&self) {}
}

/// The number that a device gave to a point of its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp(pub usize);

/// Memory of a whole device, whoever uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceBytes {
    /// The device's memory, whoever uses it.
    pub total: u64,
    /// Used by nobody.
    pub free: u64,
    /// Held by the blocks of this process.
    pub held: u64,
    /// What is set aside for blocks at a time: all of them together take whole pages.
    pub page: u64,
}

/// What context, modules and libraries of a process stay under: more than that beside our blocks is someone else's.
const OVERHEAD_BYTES_MAX: u64 = 2 << 30;

impl DeviceBytes {
    /// Neither free nor in our blocks: the context and libraries of this process, and other processes.
    pub fn beside(&self) -> u64 {
        self.total.saturating_sub(self.free + self.held)
    }

    /// What blocks could have in all, in the whole pages that a device hands out.
    pub fn room(&self) -> u64 {
        (self.free + self.held) / self.page * self.page
    }

    /// Whether other processes hold part of the memory: this one alone stays under that beside its blocks.
    pub fn is_shared(&self) -> bool {
        self.beside() > OVERHEAD_BYTES_MAX
    }

    /// Whether a refused request would have fitted on a card of our own.
    pub fn others_are_in_the_way(&self, requested: u64) -> bool {
        let alone = self.total.saturating_sub(self.held + OVERHEAD_BYTES_MAX);
        self.is_shared() && requested <= alone
    }
}

/// A block could not be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// What the device says about its memory; nothing if host memory was asked for.
    pub device_bytes: Option<DeviceBytes>,
    /// The driver's error, if it is another than that memory is short.
    pub error: Option<String>,
}

/// What a device itself says about a stretch of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceMarks {
    /// Most bytes that blocks had at a time, by the device's own count.
    pub device_used_high_bytes: u64,
    /// Most bytes that the device set aside for blocks: whole pages.
    pub device_reserved_high_bytes: u64,
    /// Used on the whole device now, by whomever.
    pub device_total_used_bytes: u64,
    /// Blocks asked for, pinned ones too.
    pub driver_allocations: u64,
}

/// A block of a device, freed when dropped.
pub(crate) struct DeviceBlock {
    blocks: Rc<dyn Blocks>,
    space: Space,
    pointer: NonNull<u8>,
}

impl DeviceBlock {
    pub(crate) fn new(
        blocks: &Rc<dyn Blocks>,
        space: Space,
        bytes: u64,
    ) -> Result<DeviceBlock, Refused> {
        Ok(DeviceBlock {
            pointer: blocks.allocate(space, bytes)?,
            blocks: blocks.clone(),
            space,
        })
    }

    pub(crate) fn pointer(&self) -> *mut u8 {
        self.pointer.as_ptr()
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` in this very space; whoever leased it has given it back.
        unsafe { self.blocks.free(self.space, self.pointer) }
    }
}

#[cfg(test)]
mod tests {
    use super::DeviceBytes;

    const GIB: u64 = 1 << 30;
    const PAGE_BYTES: u64 = 32 << 20;

    #[test]
    fn others_are_blamed_only_where_they_are_in_the_way() {
        let bytes = |free: u64, held: u64| DeviceBytes {
            total: 80 * GIB,
            free: free * GIB,
            held: held * GIB,
            page: PAGE_BYTES,
        };
        let alone = bytes(9, 70);
        assert_eq!((alone.beside(), alone.room()), (GIB, 79 * GIB));
        let uneven = DeviceBytes {
            free: alone.free - 1,
            ..alone
        };
        assert_eq!(uneven.room(), 79 * GIB - PAGE_BYTES);
        assert!(
            !alone.others_are_in_the_way(10 * GIB),
            "only our own context is beside"
        );
        let shared = bytes(4, 40);
        assert_eq!(shared.beside(), 36 * GIB);
        assert!(shared.others_are_in_the_way(30 * GIB));
        assert!(
            !shared.others_are_in_the_way(39 * GIB),
            "too much for a whole card too"
        );
    }
}
