//! A block outside of the ledger, held during a rehearsal or a measurement.

use super::CudaDevice;
use crate::{Fault, KernelError, Result};
use memory::{Blocks, Space};
use std::ptr::NonNull;

/// A zeroed block, freed when dropped.
pub(super) struct Block<'a> {
    owner: &'a CudaDevice,
    space: Space,
    pointer: NonNull<u8>,
}

impl<'a> Block<'a> {
    pub(super) fn new(
        owner: &'a CudaDevice,
        operation: &'static str,
        space: Space,
        bytes: u64,
    ) -> Result<Block<'a>> {
        let (memory, fault) = match space {
            Space::Device => ("device memory", Fault::DeviceFull),
            Space::Host => ("page-locked host memory", Fault::Device),
        };
        let refused = |_| KernelError {
            fault,
            ..KernelError::device(operation, format!("{bytes} bytes of {memory} refused"))
        };
        Ok(Block {
            owner,
            space,
            pointer: owner.allocate(space, bytes).map_err(refused)?,
        })
    }

    pub(super) fn pointer(&self) -> *mut u8 {
        self.pointer.as_ptr()
    }
}

impl Drop for Block<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`; the streams that used it have been waited for, or are by the device.
        unsafe { self.owner.free(self.space, self.pointer) }
    }
}
