//! Runs the CUDA sources of `kernels/` on the processor, for tests on machines without a GPU.
//!
//! [`Emulation`] is a driver for [`kernels::cuda::Cuda`]: the launch code, the arguments and the sources are those of
//! the device. Each CUDA thread is a fiber, which waits at barriers, warp shuffles and votes. Every access to global
//! memory, and every access by index to shared memory, is checked. `kernels/emulation/README.md` tells what this finds.
//!
//! ```
//! use emulation::Emulation;
//! use kernels::{Fill, cuda::Cuda};
//! use memory::{Category, DType, Memory};
//!
//! let memory = Memory::host();
//! let kernels = Cuda::new(Emulation::default(), &memory, DType::F32).unwrap();
//! let mut x = memory.lease(Category::Temporary, "x", [5], DType::F32).unwrap();
//! kernels.run(Fill { out: x.view_mut(), value: 2.5 }).unwrap();
//! assert_eq!(x.view().slice::<f32>(), [2.5; 5]);
//! ```

mod gemm;
mod stand_in;

pub use gemm::gemm;
pub use stand_in::{load_stand_in, stand_in_folder};

use collectives::Group;
use kernels::cuda::{Argument, Driver, Gemm, Launch, Workspace};
use kernels::{DiskCopy, Exchange, KernelError, Queue, Queues, Reading};
use memory::{In, Out};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::Arc;

/// A CUDA device emulated on the processor. Its memory is the process's own, and every call is complete when it
/// returns.
#[derive(Clone, Default)]
pub struct Emulation {
    /// The ranks that it exchanges with, if there are any.
    pub group: Option<Arc<dyn Group>>,
}

unsafe extern "C" {
    fn emulation_launch(
        source: *const c_char,
        name: *const c_char,
        grid: *const u32,
        block: *const u32,
        shared_bytes: u32,
        letters: *const c_char,
        arguments: *mut *mut c_void,
        message: *mut c_char,
        message_bytes: usize,
    ) -> c_int;
}

/// The emulation's letter for an argument's type.
fn letter(argument: &Argument) -> u8 {
    match argument {
        Argument::Pointer(_) => b'p',
        Argument::Size(_) => b's',
        Argument::Int(_) => b'i',
        Argument::Float(_) => b'f',
    }
}

impl Queues for Emulation {
    fn rank(&self) -> usize {
        self.group.as_ref().map_or(0, |group| group.rank())
    }
}

impl Driver for Emulation {
    unsafe fn launch(&self, launch: &Launch) -> Result<(), KernelError> {
        let text = |bytes: Vec<u8>| CString::new(bytes).expect("names and letters hold no zero");
        let source = text(launch.kernel.source.into());
        let name = text(launch.kernel.name.into());
        let letters = text(launch.arguments.iter().map(letter).collect());
        let mut arguments: Vec<*mut c_void> =
            launch.arguments.iter().map(Argument::address).collect();
        let mut message = [0; 1024];
        // SAFETY: the caller promises the arguments, and the emulation refuses those of other types than the kernel's
        // parameters; all pointers are to values that live until it returns.
        let failed = unsafe {
            emulation_launch(
                source.as_ptr(),
                name.as_ptr(),
                launch.grid.as_ptr(),
                launch.block.as_ptr(),
                launch.shared_bytes,
                letters.as_ptr(),
                arguments.as_mut_ptr(),
                message.as_mut_ptr(),
                message.len(),
            )
        };
        if failed == 0 {
            return Ok(());
        }
        // SAFETY: the emulation ends its message with a zero within the buffer.
        let message = unsafe { CStr::from_ptr(message.as_ptr()) };
        Err(KernelError::misfit(
            launch.kernel.name,
            message.to_string_lossy(),
        ))
    }

    unsafe fn gemm(&self, gemm: &Gemm, _workspace: Workspace) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { gemm::gemm(gemm) }
    }

    unsafe fn copy_to_device(&self, to: *mut u8, bytes: &[u8]) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    unsafe fn copy_to_host(&self, bytes: &mut [u8], from: *const u8) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    unsafe fn clear(&self, to: *mut u8, bytes: usize) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::write_bytes(to, 0, bytes) };
        Ok(())
    }

    unsafe fn start_copy(&self, _queue: Queue, out: Out, x: In) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(x.pointer(), out.pointer(), x.bytes()) };
        Ok(())
    }

    unsafe fn start_disk(&self, copy: DiskCopy) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { copy.carry_out() }
    }

    unsafe fn start_exchange(&self, exchange: Exchange) -> Result<(), KernelError> {
        // SAFETY: the caller's promise: the device's memory is the process's own.
        unsafe { exchange.carry_out(self.group.as_deref()) }
    }

    unsafe fn start_read(&self, from: *const u8, bytes: usize) -> Result<Reading, KernelError> {
        // SAFETY: the caller's promise.
        let read = unsafe { std::slice::from_raw_parts(from, bytes) };
        Ok(Reading::done(read.to_vec()))
    }
}
