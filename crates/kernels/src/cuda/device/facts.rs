//! The GPUs of the machine, and their properties.

use super::image::Code;
use super::{error, loading};
use crate::{KernelError, Result};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute};
use std::ffi::{CStr, c_char};

/// The first driver that knows Blackwell, compute capability 10 and later.
const BLACKWELL_DRIVER: i32 = 12080;

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
    /// Bytes of the second-level cache.
    pub l2_bytes: i32,
    /// The closest memory node of the machine; -1 without such nodes.
    pub host_node: i32,
    /// CUDA version of the driver, as 13000 for 13.0.
    pub driver_version: i32,
}

/// The number of GPUs. Asks the driver, so that a machine without a GPU differs from a driver that fails.
///
/// # Errors
/// [`KernelError`] if there is no driver, or it finds no GPU.
pub fn device_count() -> Result<usize> {
    if !loading::DRIVER.is_there() {
        return Err(KernelError::device(
            "cuda",
            "there is no NVIDIA driver (libcuda.so.1): install one, and in a container start it with the GPU \
             (--gpus all)",
        ));
    }
    let refused = error::of_driver("cuda");
    result::init().map_err(refused)?;
    let count = result::device::get_count().map_err(refused)?;
    Ok(count.max(0) as usize)
}

/// Asks the driver for a GPU's facts, without a context, so no memory of the GPU is taken.
///
/// # Errors
/// [`KernelError`] if there is no such GPU.
pub fn device_facts(index: usize) -> Result<DeviceFacts> {
    device_count()?;
    let asked = || DeviceFacts::ask(result::device::get(index as i32)?, index);
    asked().map_err(error::of_driver("cuda"))
}

/// A GPU's place on the machine's bus, as `0000:3B:00.0`, which other libraries know it by. Takes no memory of the GPU.
///
/// # Errors
/// [`KernelError`] if there is no such GPU.
pub fn pci_bus_id(index: usize) -> Result<String> {
    device_count()?;
    let refused = error::of_driver("cuda");
    let device = result::device::get(index as i32).map_err(refused)?;
    let mut text = [0 as c_char; 32];
    // SAFETY: writes a text with its zero within these bytes.
    let asked = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as i32, device) };
    asked.result().map_err(refused)?;
    // SAFETY: the driver has ended it with a zero.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) };
    Ok(text.to_string_lossy().into_owned())
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
            l2_bytes: ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            // Drivers before CUDA 12.2 do not know it.
            host_node: ask(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID).unwrap_or(-1),
            driver_version,
        })
    }

    /// Why this GPU multiplies no codes of FP8, if it does not.
    pub fn no_fp8(&self) -> Option<String> {
        let (name, (major, minor)) = (&self.name, self.capability);
        let is_older = self.capability < (8, 9);
        is_older.then(|| {
            format!(
                "{name} has compute capability {major}.{minor}, and products in FP8 need 8.9 (Ada) or newer"
            )
        })
    }

    /// Checks that this GPU and its driver run `code`: the part of the binary for this GPU, compiled by a toolkit of
    /// this version (12090 for 12.9).
    ///
    /// # Errors
    /// [`KernelError`], with what to do, where they do not.
    pub(super) fn check(&self, code: Option<Code>, toolkit_version: i32) -> Result {
        let refuse = |message| Err(KernelError::device("cuda", message));
        let (name, (major, minor)) = (&self.name, self.capability);
        // The PTX is for Ampere, the first with asynchronous copies and tensor cores for bf16.
        let Some(code) = code else {
            return refuse(format!(
                "{name} has compute capability {major}.{minor}; the kernels need 8.0 (Ampere) or newer"
            ));
        };
        let needed = self.driver_needed(code, toolkit_version);
        if self.driver_version >= needed {
            return Ok(());
        }
        let [has, needed, toolkit] =
            [self.driver_version, needed, toolkit_version].map(version_text);
        refuse(format!(
            "the driver of {name} is for CUDA {has}, and the kernels of this binary ({code}, compiled by CUDA {toolkit}) \
             need one for CUDA {needed} or newer on it: update the driver (nvidia-smi shows its CUDA version), or build \
             with the toolkit that scripts/cuda-toolkit installs, which asks for the least"
        ))
    }

    /// The oldest driver that runs `code` on this GPU, by the CUDA version that the driver tells.
    ///
    /// NVIDIA's rules ("CUDA Compatibility"): machine code runs on every driver that knows the GPU and has at least the
    /// toolkit's major version (minor version compatibility). PTX needs a driver that is at least as new as its
    /// toolkit, down to the minor version.
    ///
    /// So the answer is CUDA 12.0 or more. Our own calls need less: memory pools came with 11.2. The closest node of
    /// host memory came with 12.2, and is optional.
    fn driver_needed(&self, code: Code, toolkit_version: i32) -> i32 {
        let oldest = match code {
            Code::MachineCode { .. } => toolkit_version / 1000 * 1000,
            Code::Ptx { .. } => toolkit_version,
        };
        match self.capability.0 {
            10.. => oldest.max(BLACKWELL_DRIVER),
            _ => oldest,
        }
    }
}

/// 13000 as 13.0.
pub(super) fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(capability: (i32, i32), driver_version: i32) -> DeviceFacts {
        DeviceFacts {
            index: 0,
            name: "the GPU".into(),
            capability,
            multiprocessors: 132,
            shared_bytes_max: 232448,
            l2_bytes: 50 << 20,
            host_node: 0,
            driver_version,
        }
    }

    const PTX: Code = Code::Ptx {
        capability: (8, 0),
        version: (8, 8),
    };

    #[test]
    fn the_oldest_driver_follows_from_the_code_and_the_gpu() {
        for (capability, toolkit, of_machine_code, of_ptx) in [
            ((8, 0), 12090, 12000, 12090),
            ((9, 0), 12090, 12000, 12090),
            ((10, 0), 12090, 12080, 12090),
            ((12, 1), 12080, 12080, 12080),
            ((9, 0), 13020, 13000, 13020),
            ((12, 0), 13020, 13000, 13020),
        ] {
            let facts = facts(capability, 0);
            let machine_code = Code::MachineCode { capability };
            assert_eq!(facts.driver_needed(machine_code, toolkit), of_machine_code);
            assert_eq!(facts.driver_needed(PTX, toolkit), of_ptx);
        }
    }

    #[test]
    fn a_driver_is_refused_where_it_cannot_run_the_kernels() {
        let hopper = Some(Code::MachineCode { capability: (9, 0) });
        facts((9, 0), 12000).check(hopper, 12090).unwrap();
        facts((9, 0), 14010).check(hopper, 12090).unwrap();
        facts((11, 0), 12090).check(Some(PTX), 12090).unwrap();
        let message = |driver: i32, code, toolkit| {
            let checked = facts((9, 0), driver).check(code, toolkit);
            checked.unwrap_err().message
        };
        let refused = [
            (
                message(11080, hopper, 12090),
                ["11.8", "(sm_90, compiled by CUDA 12.9)", "12.0"],
            ),
            (
                message(12090, hopper, 13020),
                ["12.9", "(sm_90, compiled by CUDA 13.2)", "13.0"],
            ),
            (
                message(12080, Some(PTX), 12090),
                ["12.8", "(compute_80 ptx 8.8, compiled", "12.9"],
            ),
        ];
        for (message, [has, code, needed]) in refused {
            for part in [
                &format!("the driver of the GPU is for CUDA {has}, "),
                code,
                &format!("need one for CUDA {needed} or newer"),
                "update the driver",
            ] {
                assert!(message.contains(part), "{message}");
            }
        }
        let too_old = message(13000, None, 12090);
        assert!(too_old.contains("need 8.0 (Ampere)"), "{too_old}");
    }
}
