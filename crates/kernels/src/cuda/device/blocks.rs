//! The device's memory, for the ledger.
//!
//! Blocks come from our own stream-ordered pool. A run needs few blocks: its slab, and the leases that live across
//! steps. Plain allocations would do for them, but a pool counts: its marks are the driver's own account of what this
//! run used and held, and nothing else allocates from it. It keeps freed memory (the release threshold is at its
//! maximum), and never reuses memory depending on timing.

use super::numa::Preference;
use super::{CudaDevice, error};
use cudarc::driver::result::{self, DriverError, mem_pool};
use cudarc::driver::sys::{self, CUmemPool_attribute as Attribute, CUresult};
use memory::{Blocks, DeviceBytes, DeviceMarks, GRANULARITY_BYTES, Place, Refused, Space, Stamp};
use std::cell::Cell;
use std::ptr::NonNull;
use std::time::Duration;

/// A pool of device memory, and the number of requests to it.
pub(super) struct Pool {
    handle: sys::CUmemoryPool,
    /// Bytes that it sets aside at a time.
    page: u64,
    allocations: Cell<u64>,
}

/// The page size to assume if a card is too full to find out: that of most drivers.
const PAGE_BYTES: u64 = 2 << 20;

impl Pool {
    /// A pool of the device whose context is current, which allocates in the order of a stream.
    pub(super) fn new(device: sys::CUdevice, stream: sys::CUstream) -> Result<Pool, DriverError> {
        let properties = sys::CUmemPoolProps {
            allocType: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            handleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: sys::CUmemLocation {
                type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: device,
            },
            win32SecurityAttributes: std::ptr::null_mut(),
            maxSize: 0,
            usage: 0,
            reserved: [0; 54],
        };
        // SAFETY: the properties are valid, and read before the call returns.
        let handle = unsafe { mem_pool::create(&properties) }?;
        let mut pool = Pool {
            handle,
            page: PAGE_BYTES,
            allocations: Cell::new(0),
        };
        pool.set(Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)?;
        pool.set(Attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, 0i32)?;
        pool.find_page(stream)?;
        Ok(pool)
    }

    /// Finds what the pool sets aside for its first, smallest block: 2 MiB with most drivers, 32 with some.
    fn find_page(&mut self, stream: sys::CUstream) -> Result<(), DriverError> {
        // SAFETY: pool and stream live.
        let asked =
            unsafe { mem_pool::alloc_async(self.handle, GRANULARITY_BYTES as usize, stream) };
        let block = match asked {
            Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => return Ok(()),
            asked => asked?,
        };
        let held = self.get(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
        self.page = held.max(GRANULARITY_BYTES);
        // SAFETY: allocated above, and never used.
        unsafe { result::free_async(block, stream) }?;
        self.trim(stream)
    }

    /// Returns the pool's free memory to the driver, after all work of the stream is done.
    fn trim(&self, stream: sys::CUstream) -> Result<(), DriverError> {
        // SAFETY: pool and stream live.
        unsafe {
            result::stream::synchronize(stream)?;
            mem_pool::trim_to(self.handle, 0)
        }
    }

    /// Sets an attribute of the value's type: switches are `i32`, sizes `u64`.
    fn set<T>(&self, attribute: Attribute, mut value: T) -> Result<(), DriverError> {
        let value = std::ptr::from_mut(&mut value).cast();
        // SAFETY: the pool is alive, and the value of the attribute's type.
        unsafe { mem_pool::set_attribute(self.handle, attribute, value) }
    }

    /// A size; 0 if the driver refuses to tell after a failure.
    fn get(&self, attribute: Attribute) -> u64 {
        let mut value = 0u64;
        let pointer = std::ptr::from_mut(&mut value).cast();
        // SAFETY: the pool is alive, and sizes are 64 bits wide.
        let asked = unsafe { mem_pool::get_attribute(self.handle, attribute, pointer) };
        asked.map_or(0, |()| value)
    }

    /// The high mark since the last reset. Some drivers raise it only at an allocation, so the pool's present value
    /// counts too.
    fn high(&self, mark: Attribute, now: Attribute) -> u64 {
        self.get(mark).max(self.get(now))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: created in `new`; every block has been freed, since each holds the device that owns the pool.
        let _ = unsafe { mem_pool::destroy(self.handle) };
    }
}

impl CudaDevice {
    /// What the driver says about the whole device.
    pub(super) fn device_bytes(&self) -> Result<DeviceBytes, DriverError> {
        let (free, total) = result::mem_get_info()?;
        Ok(DeviceBytes {
            total: total as u64,
            free: free as u64,
            held: self
                .pool
                .get(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT),
            page: self.pool.page,
        })
    }

    /// # Safety
    /// `to` starts `bytes` bytes of a live block.
    pub(super) unsafe fn set(
        &self,
        to: *mut u8,
        value: u8,
        bytes: usize,
    ) -> Result<(), DriverError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { result::memset_d8_async(to as u64, value, bytes, self.stream) }
    }

    fn allocate_device(&self, bytes: u64) -> Result<NonNull<u8>, DriverError> {
        let ask = || {
            // SAFETY: pool and stream live as long as `self`.
            unsafe { mem_pool::alloc_async(self.pool.handle, bytes as usize, self.stream) }
        };
        let block = match ask() {
            Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                self.pool.trim(self.stream)?;
                ask()?
            }
            asked => asked?,
        };
        let pointer = block as *mut u8;
        // Copies use other streams and may start as soon as this returns. Waiting costs little, since blocks are few.
        // SAFETY: the block is new, and of this size.
        let zeroed = unsafe { self.set(pointer, 0, bytes as usize) };
        if let Err(error) = zeroed.and_then(|()| self.synchronize()) {
            // SAFETY: nothing uses it.
            let _ = unsafe { result::free_async(block, self.stream) };
            return Err(error);
        }
        NonNull::new(pointer).ok_or(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY))
    }

    /// Returns the pool's free memory to the driver, for other processes.
    ///
    /// # Errors
    /// [`crate::KernelError`] if the driver refuses, or earlier work failed.
    pub fn trim(&self) -> crate::Result {
        let trimmed = self.pool.trim(self.stream);
        trimmed.map_err(error::of_driver("cuda"))
    }

    fn allocate_pinned(&self, bytes: u64) -> Result<NonNull<u8>, DriverError> {
        let _preference = Preference::new(self.facts.host_node);
        // Not write-combined, because the processor reads it too.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: nothing reads the memory before it is zeroed below.
        let block = unsafe { result::malloc_host(bytes as usize, flags) }?;
        let block = NonNull::new(block.cast::<u8>());
        let block = block.ok_or(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY))?;
        // SAFETY: just allocated with this size, in host memory.
        unsafe { block.write_bytes(0, bytes as usize) };
        Ok(block)
    }

    fn refused(&self, space: Space, error: DriverError) -> Refused {
        let is_short = error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        Refused {
            device_bytes: match space {
                Space::Device => self.device_bytes().ok(),
                Space::Host => None,
            },
            error: (!is_short).then(|| error::name(error)),
        }
    }
}

impl Blocks for CudaDevice {
    fn device(&self) -> &'static str {
        "CUDA"
    }

    fn allocate(&self, space: Space, bytes: u64) -> Result<NonNull<u8>, Refused> {
        self.pool.allocations.set(self.pool.allocations.get() + 1);
        let block = match space {
            Space::Device => self.allocate_device(bytes),
            Space::Host => self.allocate_pinned(bytes),
        };
        block.map_err(|error| self.refused(space, error))
    }

    unsafe fn free(&self, space: Space, block: NonNull<u8>) {
        // Waiting does not reach calls that are kept back and not yet made. After a panic they are never made.
        assert!(
            !self.keeps_back.get() || std::thread::panicking(),
            "a block of memory goes within a section, whose calls may be about to use it"
        );
        // Blocks are few and are freed between steps; copies beside the computation may still use one. A failure here
        // is one of earlier work, which the next operation reports.
        let _ = self.synchronize_all();
        if self.streams.has_failed() {
            // The driver would wait for the work that may use the block, so it is leaked.
            return;
        }
        let _ = match space {
            // SAFETY: the caller's promise, and nothing uses the block any more.
            Space::Device => unsafe { result::free_async(block.as_ptr() as u64, self.stream) },
            // SAFETY: as above.
            Space::Host => unsafe { result::free_host(block.as_ptr().cast()) },
        };
    }

    unsafe fn fill(&self, pointer: *mut u8, value: u8, bytes: u64) {
        // Poison is for tests. It would run too early, before calls that are kept back.
        if self.keeps_back.get() {
            return;
        }
        // A failure here is one of earlier work, which the next operation reports.
        // SAFETY: the caller's promise.
        let _ = unsafe { self.set(pointer, value, bytes as usize) };
    }

    fn reset_marks(&self) {
        // If marks cannot be reset, they include earlier steps: they are too high, never too low.
        let _ = self
            .pool
            .set(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0u64);
        let _ = self
            .pool
            .set(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 0u64);
        self.pool.allocations.set(0);
    }

    fn marks(&self) -> DeviceMarks {
        let used = |bytes: DeviceBytes| bytes.total - bytes.free;
        DeviceMarks {
            device_used_high_bytes: self.pool.high(
                Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
                Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
            ),
            device_reserved_high_bytes: self.pool.high(
                Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
                Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
            ),
            device_total_used_bytes: self.device_bytes().map_or(0, used),
            driver_allocations: self.pool.allocations.get(),
        }
    }

    fn stamp(&self) -> Option<Stamp> {
        if self.keeps_back.get() {
            return None;
        }
        self.stamps.put(self.stream).ok()
    }

    fn elapsed(&self, from: Stamp, to: Stamp) -> Option<Duration> {
        self.stamps.elapsed(from, to).ok()
    }

    fn give_back_stamp(&self, stamp: Stamp) {
        self.stamps.give_back(stamp);
    }

    fn enter(&self, place: Place) {
        if self.ranges.get() {
            nvtx::range_push!("{place}");
        }
    }

    fn leave(&self) {
        if self.ranges.get() {
            nvtx::range_pop!();
        }
    }
}
