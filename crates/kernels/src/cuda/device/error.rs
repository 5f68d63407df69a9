//! Turns errors of the driver and of cuBLASLt into errors that say what to do.

use crate::{Fault, KernelError};
use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys::cublasStatus_t;
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUresult;

/// Makes an error of the driver one of an operation.
pub(super) fn of_driver(operation: &'static str) -> impl Fn(DriverError) -> KernelError + Copy {
    move |error| {
        let text = error.error_string().ok();
        let text = text.map_or_else(String::new, |text| format!(": {}", text.to_string_lossy()));
        KernelError {
            operation,
            message: format!("{}{text}; {}", name(error), advice(error.0)),
            fault: match error.0 {
                CUresult::CUDA_ERROR_OUT_OF_MEMORY => Fault::DeviceFull,
                _ => Fault::Device,
            },
        }
    }
}

/// The driver's name for an error.
pub(super) fn name(error: DriverError) -> String {
    format!("{:?}", error.0)
}

/// An error of cuBLASLt.
pub(super) fn of_library(message: impl std::fmt::Display, error: CublasError) -> KernelError {
    let advice = match error.0 {
        cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED => {
            "; this cuBLASLt has no such product for this GPU. FP8 needs compute capability 8.9 or newer, and on 10.0 and newer \
             cuBLASLt 12.8: update it, or leave --fp8 out"
        }
        _ => "",
    };
    KernelError::device("gemm", format!("{message}: {:?}{advice}", error.0))
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
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
        | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE => {
            "the GPU's hardware or its NVLink failed: look at nvidia-smi -q, nvidia-smi nvlink -e and dmesg (Xid); reset the \
             GPU, or go on with another"
        }
        CUresult::CUDA_ERROR_SYSTEM_NOT_READY => {
            "the GPUs of this machine are joined by NVSwitch, and the service that sets it up does not run: start it \
             (systemctl start nvidia-fabricmanager), in the driver's version, and look at nvidia-smi -q, `Fabric`"
        }
        CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => {
            "another process has the GPU for itself, or its compute mode forbids all: look at nvidia-smi, and set it with \
             nvidia-smi -c DEFAULT"
        }
        CUresult::CUDA_ERROR_LAUNCH_TIMEOUT => {
            "the GPU also draws a screen, and its driver ends kernels that hold it up for seconds: use a GPU without a \
             screen, or a smaller --micro-batch"
        }
        CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND => {
            "this binary has no machine code for this GPU, so that the driver has to compile, and its compiler is missing: \
             install libnvidia-ptxjitcompiler of the driver's version (in a container, NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        }
        _ => "nvidia-smi and dmesg may say more",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_users_meet_say_what_to_do() {
        for (error, word) in [
            (
                CUresult::CUDA_ERROR_SYSTEM_NOT_READY,
                "nvidia-fabricmanager",
            ),
            (CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE, "nvlink"),
            (CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE, "-c DEFAULT"),
            (CUresult::CUDA_ERROR_LAUNCH_TIMEOUT, "screen"),
            (
                CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
                "libnvidia-ptxjitcompiler",
            ),
        ] {
            assert!(advice(error).contains(word), "{error:?}");
        }
        let of = |status| of_library("a product", CublasError(status)).message;
        assert!(of(cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED).contains("--fp8"));
        let other = of(cublasStatus_t::CUBLAS_STATUS_INTERNAL_ERROR);
        assert_eq!(other, "a product: CUBLAS_STATUS_INTERNAL_ERROR");
    }
}
