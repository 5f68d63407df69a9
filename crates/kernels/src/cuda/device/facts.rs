//! Which GPUs there are, and what they are.

use super::error;
use crate::KernelError;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute};

/// The kernels use what came with Ampere: asynchronous copies, and tensor cores for bf16.
const CAPABILITY_MIN: (i32, i32) = (8, 0);

/// Major compute capabilities that the binary has machine code for: it runs on every minor one from that which it was
/// made for, 8.0 and 9.0. Later GPUs have theirs compiled from PTX by the driver.
const MACHINE_CODE_FOR: [i32; 2] = [8, 9];

/// What a GPU is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its number, from 0, among those that CUDA_VISIBLE_DEVICES shows.
    pub index: usize,
    /// The name that NVIDIA gives it: `NVIDIA H200`.
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

    /// Whether this GPU and its driver run kernels that were compiled by a toolkit of this version (13000 for 13.0).
    ///
    /// # Errors
    /// [`KernelError`], with what to do, where they do not.
    pub(super) fn check(&self, toolkit_version: i32) -> Result<(), KernelError> {
        let ((major, minor), (least, least_minor)) = (self.capability, CAPABILITY_MIN);
        if self.capability < CAPABILITY_MIN {
            return Err(KernelError::device(
                "cuda",
                format!(
                    "{} has compute capability {major}.{minor}; the kernels need {least}.{least_minor} (Ampere) or \
                     newer",
                    self.name
                ),
            ));
        }
        let needed = self.driver_needed(toolkit_version);
        if self.driver_version >= needed {
            return Ok(());
        }
        let [has, needed, toolkit] =
            [self.driver_version, needed, toolkit_version].map(version_text);
        Err(KernelError::device(
            "cuda",
            format!(
                "the driver of {} is for CUDA {has}, and the kernels of this binary, compiled by CUDA {toolkit}, need \
                 one for CUDA {needed} or newer on it: update the driver (nvidia-smi shows its CUDA version), or build \
                 with an older toolkit (CUDA_HOME)",
                self.name
            ),
        ))
    }

    /// The oldest driver that runs kernels compiled by a toolkit, by the CUDA version that the driver tells.
    ///
    /// NVIDIA's rules ("CUDA Compatibility"): machine code runs on every driver of the toolkit's major version and
    /// later (minor version compatibility). PTX is newer than the compiler in any driver that is older than its
    /// toolkit, even by a minor version.
    fn driver_needed(&self, toolkit_version: i32) -> i32 {
        match MACHINE_CODE_FOR.contains(&self.capability.0) {
            true => toolkit_version / 1000 * 1000,
            false => toolkit_version,
        }
    }
}

/// 13000 as 13.0.
fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_is_refused_where_it_cannot_run_the_kernels() {
        let facts = |capability, driver_version| DeviceFacts {
            index: 0,
            name: "the GPU".into(),
            capability,
            multiprocessors: 132,
            shared_bytes_max: 232448,
            host_node: 0,
            driver_version,
        };
        let is_enough =
            |capability, driver, toolkit| facts(capability, driver).check(toolkit).is_ok();
        for capability in [(8, 0), (8, 6), (8, 9), (9, 0)] {
            assert!(is_enough(capability, 13000, 13000));
            assert!(is_enough(capability, 13000, 13020), "minor versions");
            assert!(is_enough(capability, 12020, 12040), "minor versions");
            assert!(is_enough(capability, 14010, 13020), "later drivers");
            assert!(!is_enough(capability, 12090, 13000));
        }
        assert!(is_enough((12, 0), 13020, 13020) && is_enough((12, 0), 14000, 13020));
        assert!(
            !is_enough((12, 0), 13010, 13020),
            "PTX is compiled by the driver"
        );
        assert!(!is_enough((7, 5), 13000, 13000));
        let message = facts((9, 0), 12090).check(13020).unwrap_err().message;
        for part in [
            "the driver of the GPU is for CUDA 12.9",
            "compiled by CUDA 13.2",
            "one for CUDA 13.0 or newer",
            "update the driver",
        ] {
            assert!(message.contains(part), "{message}");
        }
    }
}
