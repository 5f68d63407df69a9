//! The trait [`Blocks`]: what a device has to offer a memory.

use crate::{Place, Space};
use serde::Serialize;
use std::ptr::NonNull;
use std::rc::Rc;
use std::time::Duration;

/// A device's memory, handed out in few, large blocks.
///
/// Blocks are allocated and freed between steps. A new block is zero for every queue of the device. A block is freed
/// only after all work that was enqueued earlier is done.
pub trait Blocks {
    /// The device's name in messages, such as `CUDA`.
    fn device(&self) -> &'static str;

    /// Allocates a zeroed block of `bytes`, a multiple of the granularity and more than 0. Device memory cannot be read
    /// by the processor; page-locked host memory can.
    ///
    /// # Errors
    /// [`Refused`] if there is no room.
    fn allocate(&self, space: Space, bytes: u64) -> Result<NonNull<u8>, Refused>;

    /// Frees a block. Not to be called while calls are being captured to be launched together.
    ///
    /// # Safety
    /// `block` comes from [`Blocks::allocate`] with this `space`, and no work that is enqueued later uses it.
    unsafe fn free(&self, space: Space, block: NonNull<u8>);

    /// Sets `bytes` bytes of device memory to `value`.
    ///
    /// # Safety
    /// `pointer` starts as many bytes of a live block, which nothing else uses.
    unsafe fn fill(&self, pointer: *mut u8, value: u8, bytes: u64);

    /// Restarts the figures that [`Blocks::marks`] returns.
    fn reset_marks(&self) {}

    /// The device's own figures since [`Blocks::reset_marks`].
    fn marks(&self) -> DeviceMarks {
        DeviceMarks::default()
    }

    /// Puts a stamp into the stream, which records when all earlier work is done. Does not wait. None if the device
    /// refuses after a failure.
    fn stamp(&self) -> Option<Stamp> {
        None
    }

    /// The device's time between two stamps. Waits for the later one. None if earlier work failed.
    fn elapsed(&self, _from: Stamp, _to: Stamp) -> Option<Duration> {
        None
    }

    /// Returns a stamp, which the device may then use again.
    fn give_back_stamp(&self, _stamp: Stamp) {}

    /// Tells profilers that a place has been entered.
    fn enter(&self, _place: Place) {}

    /// Tells profilers that the place entered last has been left.
    fn leave(&self) {}
}

/// A point in a device's stream, by the number that the device gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp(pub usize);

/// Memory of a whole device, for all processes together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceBytes {
    /// The device's memory in bytes.
    pub total: u64,
    /// Bytes that no process uses.
    pub free: u64,
    /// Held by the blocks of this process.
    pub held: u64,
    /// The page size of the device: it sets memory aside for all blocks together in whole pages.
    pub page: u64,
}

/// The context, modules and libraries of one process take less than this. More memory than that outside our blocks
/// belongs to another process.
const OVERHEAD_BYTES_MAX: u64 = 2 << 30;

impl DeviceBytes {
    /// Bytes that are neither free nor in our blocks: this process's context and libraries, and other processes.
    pub fn beside(&self) -> u64 {
        self.total.saturating_sub(self.free + self.held)
    }

    /// The most that blocks could have in all, in whole pages.
    pub fn room(&self) -> u64 {
        (self.free + self.held) / self.page * self.page
    }

    /// Whether other processes hold part of the memory: this process alone would use less outside its blocks.
    pub fn is_shared(&self) -> bool {
        self.beside() > OVERHEAD_BYTES_MAX
    }

    /// Whether a refused request would have fitted if no other process used the device.
    pub fn others_are_in_the_way(&self, requested: u64) -> bool {
        let alone = self.total.saturating_sub(self.held + OVERHEAD_BYTES_MAX);
        self.is_shared() && requested <= alone
    }
}

/// The device or the host refused a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The device's figures for its memory; none if host memory was requested.
    pub device_bytes: Option<DeviceBytes>,
    /// The driver's error, unless it only reports a lack of memory.
    pub error: Option<String>,
}

/// The device's own figures for a stretch of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceMarks {
    /// Most bytes in blocks at one time, by the device's count.
    pub device_used_high_bytes: u64,
    /// Most bytes that the device set aside for blocks, in whole pages.
    pub device_reserved_high_bytes: u64,
    /// Bytes used on the whole device now, by all processes.
    pub device_total_used_bytes: u64,
    /// Blocks requested, pinned ones included.
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
        // SAFETY: `new` allocated the block in this space, and its lease has ended.
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
