//! Which GPUs there are, and what they are.

use super::error;
use crate::KernelError;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute};

/// The kernels use what came with Ampere: asynchronous copies, and tensor cores for bf16.
const CAPABILITY_MIN: (i32, i32) = (8, 0);

/// What a GPU is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its number, from 0, among those that CUDA_VISIBLE_DEVICES shows.
    pub index: usize,
    /// As NVIDIA calls it: `NVIDIA H200`.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Multiprocessors.
    pub multiprocessors: i32,
    /// Most shared memory of a block.
    pub shared_bytes_max: i32,
    /// The machine's node of memory that is closest; -1 where it has no nodes.
    pub host_node: i32,
    /// CUDA version of the driver, as 13000 for 13.0.
    pub driver_version: i32,
}

/// The number of GPUs. Asks the driver, so that a machine without one is told apart from a driver that fails.
///
/// # Errors
/// [`KernelError`] if there is no driver, or it finds no GPU.
pub fn device_count() -> Result<usize, KernelError> {
    // SAFETY: only looks for the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(KernelError::device(
            "cuda",
            "there is no NVIDIA driver (libcuda.so.1): install one, and in a container start it with the GPU \
             (--gpus all)",
        ));
    }
    let refused = |error| error::of_driver("cuda", error);
    result::init().map_err(refused)?;
    let count = result::device::get_count().map_err(refused)?;
    Ok(count.max(0) as usize)
}

impl DeviceFacts {
    pub(super) fn ask(device: sys::CUdevice, index: usize) -> Result<DeviceFacts, DriverError> {
        // SAFETY: the device comes from the driver.
        let ask = |attribute| unsafe { result::device::get_attribute(device, attribute) };
        let mut driver_version = 0;
        // SAFETY: writes one number.
        unsafe { sys::cuDriverGetVersion(&mut driver_version) }.result()?;
        Ok(DeviceFacts {
            index,
            name: result::device::get_name(device)?,
            capability: (
                ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes_max: ask(
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
            // Drivers before CUDA 12.2 do not know it.
            host_node: ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID).unwrap_or(-1),
            driver_version,
        })
    }

    pub(super) fn check(&self) -> Result<(), KernelError> {
        if self.capability >= CAPABILITY_MIN {
            return Ok(());
        }
        let ((major, minor), (least, least_minor)) = (self.capability, CAPABILITY_MIN);
        Err(KernelError::device(
            "cuda",
            format!(
                "{} has compute capability {major}.{minor}; the kernels need {least}.{least_minor} (Ampere) or newer",
                self.name
            ),
        ))
    }
}
