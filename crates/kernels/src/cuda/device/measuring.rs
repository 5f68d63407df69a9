//! Measures work on a GPU: its time by events, and the registers and memory of a kernel.

use super::{CudaDevice, error};
use crate::cuda::Kernel;
use crate::{Queue, Result};
use cudarc::driver::{result, sys};
use std::time::Duration;

/// Registers and memory of a kernel, and how many of its blocks a multiprocessor holds, as the driver tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupancy {
    /// Registers of a thread.
    pub registers: i32,
    /// Bytes of a thread's local memory, where spilled registers lie.
    pub local_bytes: i32,
    /// Blocks that are on a multiprocessor at a time.
    pub blocks: i32,
}

impl CudaDevice {
    /// Does `work`, waits for what it enqueued in `queue`, and gives the time that this took on the device: that between
    /// two CUDA events in the queue's stream, without launches and waits of the host.
    ///
    /// # Errors
    /// As `work`, and [`crate::KernelError`] if the driver refuses or what was enqueued failed.
    ///
    /// # Panics
    /// In a section, whose calls come later, and for a disk's queue, which is no stream.
    pub fn timed(&self, queue: Queue, work: impl FnOnce() -> Result) -> Result<Duration> {
        assert!(!self.keeps_back.get(), "the calls of a section come later");
        let refused = error::of_driver("timed");
        let stream = self.streams.of(queue);
        let begun = self.stamps.put(stream).map_err(refused)?;
        let done = work();
        let ended = self.stamps.put(stream).map_err(refused);
        let elapsed = ended.and_then(|ended| {
            let waited = self.streams.synchronize(queue);
            self.streams.check()?;
            let elapsed = waited.and_then(|()| self.stamps.elapsed(begun, ended));
            let elapsed = elapsed.map_err(refused);
            self.stamps.give_back(ended);
            elapsed
        });
        self.stamps.give_back(begun);
        done.and(elapsed)
    }

    /// The occupancy of a kernel of this binary, in blocks of this shape with so much dynamic shared memory.
    ///
    /// # Errors
    /// [`crate::KernelError`] if there is no such kernel, or the driver refuses.
    pub fn occupancy(
        &self,
        kernel: Kernel,
        block: [u32; 3],
        shared_bytes: u32,
    ) -> Result<Occupancy> {
        use sys::CUfunction_attribute as Attribute;
        let function = self.modules.function(kernel, shared_bytes)?.handle;
        let refused = error::of_driver(kernel.name);
        // SAFETY: modules are loaded as long as the device is open.
        let ask =
            |attribute| unsafe { result::function::get_function_attribute(function, attribute) };
        let (threads, mut blocks) = (block.iter().product::<u32>() as i32, 0);
        // SAFETY: as above; one number is written.
        let asked = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                function,
                threads,
                shared_bytes as usize,
            )
        };
        asked.result().map_err(refused)?;
        Ok(Occupancy {
            registers: ask(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS).map_err(refused)?,
            local_bytes: ask(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES).map_err(refused)?,
            blocks,
        })
    }
}
