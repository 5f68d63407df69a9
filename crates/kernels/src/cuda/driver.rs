//! The trait [`Driver`]: what a CUDA device, or its emulation on the processor, does for the launch code.

use super::calls::{Gemm, Launch, Workspace};
use crate::{DiskCopy, Exchange, Operation, Queue, Queues, Reading, Result};
use memory::{In, Out};

/// A device with a stream per queue, except a disk's queues, which are threads. Calls run in the stream of computation,
/// in order. Exceptions are [`Driver::start_copy`], [`Driver::start_disk`], [`Driver::start_exchange`], and launches
/// that name another queue.
///
/// Only [`Driver::copy_to_host`] and [`Queues::finish`] wait, and [`Driver::copy_to_device`] if many uploads are
/// running. A call fails if the device refuses it; the error may belong to earlier work.
pub trait Driver: Queues {
    /// Announces an operation before its calls, for drivers that list calls.
    fn begin_operation(&self, _operation: &Operation) {}

    /// Launches a kernel.
    ///
    /// # Safety
    /// The arguments are those of the kernel, and point to what it reads and writes, which nothing else writes.
    unsafe fn launch(&self, launch: &Launch) -> Result;

    /// Computes matrix products.
    ///
    /// # Safety
    /// Every matrix lies in live tensors, which nothing else writes; none but `init` overlaps `out`, and `init` is
    /// `out` if it does. `workspace` is not used by anything else.
    unsafe fn gemm(&self, gemm: &Gemm, workspace: Workspace) -> Result;

    /// Copies host bytes to the device. The caller may change them when this returns.
    ///
    /// # Safety
    /// `to` starts as many bytes on the device.
    unsafe fn copy_to_device(&self, to: *mut u8, bytes: &[u8]) -> Result;

    /// Copies bytes to the host after all earlier work is done.
    ///
    /// # Safety
    /// `from` starts as many bytes on the device.
    unsafe fn copy_to_host(&self, bytes: &mut [u8], from: *const u8) -> Result;

    /// Sets `bytes` bytes to 0.
    ///
    /// # Safety
    /// `to` starts as many bytes on the device.
    unsafe fn clear(&self, to: *mut u8, bytes: usize) -> Result;

    /// Starts a copy between the device and pinned host memory. The queue tells the direction.
    ///
    /// # Safety
    /// As for [`crate::Kernels::start_upload`]; both have as many bytes.
    unsafe fn start_copy(&self, queue: Queue, out: Out, x: In) -> Result;

    /// Starts a copy between a file and pinned host memory, in its queue.
    ///
    /// # Safety
    /// As for [`crate::Kernels::start_disk_read`] and [`crate::Kernels::start_disk_write`].
    ///
    /// # Errors
    /// [`crate::KernelError`] if the device refuses or a file failed. After a failed file, every later call that can wait
    /// fails too, once no work is running.
    unsafe fn start_disk(&self, copy: DiskCopy) -> Result;

    /// Starts an exchange of device memory with other ranks, in its queue.
    ///
    /// # Safety
    /// As for [`crate::Backend::ask`].
    ///
    /// # Errors
    /// [`crate::KernelError`] if there is no group or no such rank, the device refuses, or an exchange failed. After a failed
    /// exchange, every later call that can wait fails too.
    unsafe fn start_exchange(&self, exchange: Exchange) -> Result;

    /// Starts to read a few bytes, at most [`crate::READING_BYTES_MAX`], in the queue of computation. They stay
    /// unchanged for [`crate::READINGS_MAX`] readings.
    ///
    /// # Safety
    /// `from` starts as many bytes on the device.
    unsafe fn start_read(&self, from: *const u8, bytes: usize) -> Result<Reading>;
}
