//! What a CUDA device does for the launch code; the emulation does the same on the processor.

use super::calls::{Gemm, Launch, LibraryAttention, Workspace};
use crate::{DiskCopy, Event, Exchange, KernelError, Operation, Queue, Reading, Section};

/// A device with a stream for each queue, but for those of a disk, which are threads. All but [`Driver::start_copy`],
/// [`Driver::start_disk`], [`Driver::start_exchange`], and launches that name another queue, runs in
/// the stream of computation, in the order in which it was asked for.
///
/// Only [`Driver::copy_to_host`] and [`Driver::finish`] wait, and [`Driver::copy_to_device`] where many uploads are under
/// way. An error may belong to earlier work.
///
/// A driver that does everything when it is asked leaves out [`Driver::record`], [`Driver::wait`] and [`Driver::finish`].
pub trait Driver {
    /// Told of each operation before what is asked for to carry it out: for a driver that lists calls.
    fn begin_operation(&self, _operation: &Operation) {}

    /// Launches a kernel.
    ///
    /// # Safety
    /// The arguments are those of the kernel, and point to what it reads and writes, which nothing else writes.
    ///
    /// # Errors
    /// [`KernelError`] if the kernel is unknown or the device refuses the launch.
    unsafe fn launch(&self, launch: &Launch) -> Result<(), KernelError>;

    /// Computes matrix products.
    ///
    /// # Safety
    /// Every matrix lies in live tensors, which nothing else writes; none but `init` overlaps `out`, and `init` is
    /// `out` if it does. `workspace` is not used by anything else.
    ///
    /// # Errors
    /// [`KernelError`] if the library refuses the product.
    unsafe fn gemm(&self, gemm: &Gemm, workspace: Workspace) -> Result<(), KernelError>;

    /// Computes attention by a library, where there is one.
    ///
    /// # Safety
    /// Every tensor lies in live memory, which nothing else writes; none that is written overlaps another. `workspace` is
    /// not used by anything else.
    ///
    /// # Errors
    /// [`KernelError`] if there is no such library here, or it refuses.
    unsafe fn attention(&self, attention: &LibraryAttention) -> Result<(), KernelError> {
        let message = "there is no cuDNN on this device";
        Err(KernelError::device(attention.pass().operation(), message))
    }

    /// Copies host bytes to the device; they may be changed when this returns.
    ///
    /// # Safety
    /// `to` starts as many bytes on the device.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    unsafe fn copy_to_device(&self, to: *mut u8, bytes: &[u8]) -> Result<(), KernelError>;

    /// Copies bytes to the host, when all work before is done.
    ///
    /// # Safety
    /// `from` starts as many bytes on the device.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses, or failed in earlier work.
    unsafe fn copy_to_host(&self, bytes: &mut [u8], from: *const u8) -> Result<(), KernelError>;

    /// Sets `bytes` bytes to 0.
    ///
    /// # Safety
    /// `to` starts as many bytes on the device.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    unsafe fn clear(&self, to: *mut u8, bytes: usize) -> Result<(), KernelError>;

    /// Asks for a copy between the device and pinned host memory in a copy queue: the queue says which side is which.
    ///
    /// # Safety
    /// As for [`crate::Kernels::start_upload`]; both pointers start as many bytes.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    unsafe fn start_copy(
        &self,
        queue: Queue,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), KernelError>;

    /// Asks for a copy between a file and pinned host memory, in the queue that it belongs to.
    ///
    /// # Safety
    /// As for [`crate::Kernels::start_disk_read`] and [`crate::Kernels::start_disk_write`].
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses, or a file failed: then every later call that can wait fails too, when
    /// nothing is under way any more.
    unsafe fn start_disk(&self, copy: DiskCopy) -> Result<(), KernelError>;

    /// This device's rank in its group; 0 without one.
    fn rank(&self) -> usize;

    /// Asks for an exchange of device memory with other ranks, in their queue.
    ///
    /// # Safety
    /// As for [`crate::Backend::ask`].
    ///
    /// # Errors
    /// [`KernelError`] if there is no group or no such rank, the device refuses, or an exchange failed: then every later
    /// call that can wait fails too.
    unsafe fn start_exchange(&self, exchange: Exchange) -> Result<(), KernelError>;

    /// Asks for a few bytes, at most [`crate::READING_BYTES_MAX`], in the queue of computation. They stay as they are
    /// for [`crate::READINGS_MAX`] readings.
    ///
    /// # Safety
    /// `from` starts as many bytes on the device.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    unsafe fn start_read(&self, from: *const u8, bytes: usize) -> Result<Reading, KernelError>;

    /// The present end of a queue.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    fn record(&self, _queue: Queue) -> Result<Event, KernelError> {
        Ok(Event::PAST)
    }

    /// Makes a queue wait for an event.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    fn wait(&self, _queue: Queue, _event: Event) -> Result<(), KernelError> {
        Ok(())
    }

    /// Waits until an event is over.
    ///
    /// # Errors
    /// [`KernelError`] if the device failed.
    fn finish(&self, _event: Event) -> Result<(), KernelError> {
        Ok(())
    }

    /// As [`crate::Kernels::begin_section`]: on a driver without graphs, nothing.
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    fn begin_section(&self, _section: Section) -> Result<(), KernelError> {
        Ok(())
    }

    /// As [`crate::Kernels::end_section`].
    ///
    /// # Errors
    /// [`KernelError`] if the device refuses.
    fn end_section(&self, _is_whole: bool) -> Result<(), KernelError> {
        Ok(())
    }

    /// As [`crate::Kernels::section_refusal`].
    fn section_refusal(&self) -> Option<String> {
        None
    }
}
