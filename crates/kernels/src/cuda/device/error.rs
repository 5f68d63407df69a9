//! Turns errors of the driver and of cuBLASLt into errors that say what to do.

use crate::{Fault, KernelError};
use cudarc::cublaslt::result::CublasError;
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUresult;

/// An error of the driver.
pub(super) fn of_driver(operation: &'static str, error: DriverError) -> KernelError {
    let text = error.error_string().ok();
    let text = text.map_or_else(String::new, |text| format!(": {}", text.to_string_lossy()));
    let message = format!("{}{text}; {}", name(error), advice(error.0));
    let fault = match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Fault::DeviceFull,
        _ => Fault::Device,
    };
    KernelError {
        operation,
        message,
        fault,
    }
}

/// The driver's name for an error.
pub(super) fn name(error: DriverError) -> String {
    format!("{:?}", error.0)
}

/// An error of cuBLASLt.
pub(super) fn of_library(message: impl std::fmt::Display, error: CublasError) -> KernelError {
    KernelError::device("gemm", format!("{message}: {:?}", error.0))
}

/// What the user can do.
fn advice(error: CUresult) -> &'static str {
    match error {
        CUresult::CUDA_ERROR_NO_DEVICE => {
            "the driver finds no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        }
        CUresult::CUDA_ERROR_STUB_LIBRARY => {
            "a stub for linking was loaded instead of the driver: take its folder out of LD_LIBRARY_PATH"
        }
        CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
        | CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "the driver's library and its kernel module differ: restart the machine, or take \
             compatibility packages out of LD_LIBRARY_PATH"
        }
        CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            "the driver is older than the compiler of this binary: update it, or build with the toolkit that \
             scripts/cuda-toolkit installs"
        }
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU | CUresult::CUDA_ERROR_INVALID_PTX => {
            "the kernels are for compute capability 8.0 (Ampere) and newer"
        }
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => "the device has no memory left beside what is leased",
        CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES | CUresult::CUDA_ERROR_INVALID_VALUE => {
            "this GPU has fewer registers or less shared memory than the kernel asks for, or its arguments are wrong: \
             a defect of the trainer"
        }
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
        | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
        | CUresult::CUDA_ERROR_LAUNCH_FAILED
        | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUresult::CUDA_ERROR_ASSERT => {
            "this or earlier work went wrong on the device: with CUDA_LAUNCH_BLOCKING=1 the failing operation itself \
             is named, and compute-sanitizer says where"
        }
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR => {
            "the GPU's hardware failed: look at nvidia-smi -q and dmesg"
        }
        _ => "nvidia-smi and dmesg may say more",
    }
}
