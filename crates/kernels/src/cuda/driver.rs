//! The trait [`Driver`]: what a CUDA device, or its emulation on the processor, does for the launch code.

use super::calls::{Gemm, Launch, Workspace};
use crate::backend::TimedWork;
use crate::{DiskCopy, Event, Exchange, Operation, Queue, Reading, Result, Section};
use std::time::Duration;

/// A device with a stream per queue, except a disk's queues, which are threads. Calls run in the stream of computation,
/// in order. Exceptions are [`Driver::start_copy`], [`Driver::start_disk`], [`Driver::start_exchange`], and launches
/// that name another queue.
///
/// Only [`Driver::copy_to_host`] and [`Driver::finish`] wait, and [`Driver::copy_to_device`] if many uploads are
/// running. An error may belong to earlier work.
///
/// A driver that finishes every call before it returns needs no [`Driver::record`], [`Driver::wait`],
/// [`Driver::finish`] or [`Driver::is_over`].
pub trait Driver {
    /// Announces an operation before its calls, for drivers that list calls.
    fn begin_operation(&self, _operation: &Operation) {}

    /// Launches a kernel.
    ///
    /// # Safety
    /// The arguments are those of the kernel, and point to what it reads and writes, which nothing else writes.
    ///
    /// # Errors
    /// [`KernelError`] if the kernel is unknown or the device refuses the launch.
    unsafe fn launch(&self, launch: &Launch) -> Result;

    /// Computes matrix products.
    ///
    /// # Safety
    /// Every matrix lies in live tensors, which nothing else writes; none but `init` overlaps `out`, and `init` is
    /// `out` if it does. `workspace` is not used by anything else.
    ///
    /// # Errors
    /// [`KernelError`] if the library refuses the product.
    unsafe fn gemm(&self, gemm: &Gemm, workspace: Workspace) -> Result;

    /// Copies host bytes to the device. The caller may change them when this returns.
    ///
    /// # Safety
    /// `to` starts as many bytes on the device.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    unsafe fn copy_to_device(&self, to: *mut u8, bytes: &[u8]) -> Result;

    /// Copies bytes to the host after all earlier work is done.
    ///
    /// # Safety
    /// `from` starts as many bytes on the device.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses, or failed in earlier work.
    unsafe fn copy_to_host(&self, bytes: &mut [u8], from: *const u8) -> Result;

    /// Sets `bytes` bytes to 0.
    ///
    /// # Safety
    /// `to` starts as many bytes on the device.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    unsafe fn clear(&self, to: *mut u8, bytes: usize) -> Result;

    /// Starts a copy between the device and pinned host memory. The queue tells the direction.
    ///
    /// # Safety
    /// As for [`crate::Kernels::start_upload`]; both pointers start as many bytes.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    unsafe fn start_copy(&self, queue: Queue, to: *mut u8, from: *const u8, bytes: usize)
    -> Result;

    /// Starts a copy between a file and pinned host memory, in its queue.
    ///
    /// # Safety
    /// As for [`crate::Kernels::start_disk_read`] and [`crate::Kernels::start_disk_write`].
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses or a file failed. After a failed file, every later call that can wait
    /// fails too, once no work is running.
    unsafe fn start_disk(&self, copy: DiskCopy) -> Result;

    /// This device's rank in its group; 0 without one.
    fn rank(&self) -> usize;

    /// Starts an exchange of device memory with other ranks, in its queue.
    ///
    /// # Safety
    /// As for [`crate::Backend::ask`].
    ///
    /// # Errors
    /// [`KernelError`] if there is no group or no such rank, the device refuses, or an exchange failed. After a failed
    /// exchange, every later call that can wait fails too.
    unsafe fn start_exchange(&self, exchange: Exchange) -> Result;

    /// Starts to read a few bytes, at most [`crate::READING_BYTES_MAX`], in the queue of computation. They stay
    /// unchanged for [`crate::READINGS_MAX`] readings.
    ///
    /// # Safety
    /// `from` starts as many bytes on the device.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    unsafe fn start_read(&self, from: *const u8, bytes: usize) -> Result<Reading>;

    /// Records the present end of a queue.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    fn record(&self, _queue: Queue) -> Result<Event> {
        Ok(Event::PAST)
    }

    /// Makes a queue wait for an event.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    fn wait(&self, _queue: Queue, _event: Event) -> Result {
        Ok(())
    }

    /// Waits until an event is over.
    ///
    /// # Errors
    /// [`KernelError`] if the device failed.
    fn finish(&self, _event: Event) -> Result {
        Ok(())
    }

    /// As [`crate::Backend::is_over`].
    fn is_over(&self, _event: Event) -> bool {
        true
    }

    /// As [`crate::Backend::timed`], by the device's own clock; none if it has none for the queue, and nothing is done.
    fn timed(&self, _queue: Queue, _work: TimedWork) -> Option<Result<Duration>> {
        None
    }

    /// As [`crate::Kernels::begin_section`]. Does nothing on a driver without graphs.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    fn begin_section(&self, _section: Section) -> Result {
        Ok(())
    }

    /// As [`crate::Kernels::end_section`].
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    fn end_section(&self, _is_whole: bool) -> Result {
        Ok(())
    }

    /// As [`crate::Kernels::section_refusal`].
    fn section_refusal(&self) -> Option<String> {
        None
    }
}
