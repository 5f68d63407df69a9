//! What a device is to [`Kernels`](crate::Kernels).

use crate::{
    DiskCopy, Event, Exchange, ExchangeBytes, KernelError, Operation, Queue, Reading, Section,
    Target, Traffic,
};
use memory::{In, Out};
use std::cell::Cell;

/// A device that carries out what [`Kernels`](crate::Kernels) has checked.
///
/// It is made inside a `Kernels`, where every call is checked and counted, once, whichever the device. A backend checks
/// nothing again. It refuses what the device cannot do, and reports what
/// fails; both are [`crate::Fault::Device`], but for a file that fails, [`crate::Fault::Disk`], and for other ranks that
/// cannot be reached, [`crate::Fault::Collective`].
///
/// All but [`Backend::copy_beside`], [`Backend::disk`], [`Backend::exchange`], and what is executed in [`Queue::Update`],
/// runs in [`Queue::Compute`], in the order in which it was asked for. What an operation writes is borrowed exclusively, so
/// it overlaps nothing else that the operation views; what it reads may overlap.
///
/// A device that runs ahead uses these views after the call is over. It may: leases are given out in the order of
/// [`Queue::Compute`], so what an operation was handed is its own until it has run.
pub trait Backend {
    /// The device whose scratch sizes apply.
    fn target(&self) -> Target;

    /// Whether operations may still have to be done when the call that asks for them returns.
    fn runs_ahead(&self) -> bool;

    /// Whether matrix products may have bf16 in them: on the processor they are widened in a workspace.
    fn widens(&self) -> bool;

    /// This device's rank in its group; 0 without one.
    fn rank(&self) -> usize;

    /// The count of what has crossed. A backend keeps it and does not change it.
    fn traffic(&self) -> &Cell<Traffic>;

    /// Carries out an operation in a queue: [`Queue::Compute`], or [`Queue::Update`] for one that may run beside the
    /// computation ([`Operation::runs_beside`]).
    ///
    /// # Safety
    /// The operation was checked for this backend, and in another queue than the computation's its caller promises what
    /// [`crate::Kernels::start`] asks for.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails, or cannot do this.
    unsafe fn execute(&self, queue: Queue, operation: Operation) -> Result<(), KernelError>;

    /// Copies host bytes, which may change when this returns, into a tensor.
    ///
    /// # Safety
    /// `out` is contiguous and has as many bytes.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    unsafe fn write(&self, out: Out, bytes: &[u8]) -> Result<(), KernelError>;

    /// Copies a tensor to the host, when all work before is done.
    ///
    /// # Safety
    /// `x` is contiguous and has as many bytes.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails, or failed in earlier work.
    unsafe fn read(&self, bytes: &mut [u8], x: In) -> Result<(), KernelError>;

    /// Asks for the contents of a tensor.
    ///
    /// # Safety
    /// `x` is contiguous and has at most [`crate::READING_BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    unsafe fn start_reading(&self, x: In) -> Result<Reading, KernelError>;

    /// Asks for a copy in [`Queue::Upload`], whose `x` is pinned host memory, or in [`Queue::Download`], whose `out` is.
    ///
    /// # Safety
    /// As for [`crate::Kernels::start_upload`]; both sides are contiguous and have as many bytes.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    unsafe fn copy_beside(&self, queue: Queue, out: Out, x: In) -> Result<(), KernelError>;

    /// Asks for a copy between a file and pinned host memory, in [`Queue::DiskRead`] or [`Queue::DiskWrite`].
    ///
    /// # Safety
    /// As for [`crate::Kernels::start_disk_read`] and [`crate::Kernels::start_disk_write`]; the memory is contiguous.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails, or a file has failed.
    unsafe fn disk(&self, copy: DiskCopy) -> Result<(), KernelError>;

    /// Asks for an exchange with other ranks, in [`Queue::Collective`].
    ///
    /// # Safety
    /// As for [`crate::Kernels::start_exchange`]; the pieces are contiguous, and those of this rank to itself are as large
    /// where they go as where they come.
    ///
    /// # Errors
    /// [`KernelError`] if there is no group or no such rank, the device fails, or an exchange has failed.
    unsafe fn exchange(&self, exchange: Exchange) -> Result<(), KernelError>;

    /// Notes an exchange of so many bytes without its pieces, of which none moves here. False for a backend that moves them.
    fn counts_exchange(&self, _bytes: ExchangeBytes) -> bool {
        false
    }

    /// As [`crate::Kernels::record`].
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    fn record(&self, queue: Queue) -> Result<Event, KernelError>;

    /// As [`crate::Kernels::wait`].
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    fn wait(&self, queue: Queue, event: Event, reason: &'static str) -> Result<(), KernelError>;

    /// As [`crate::Kernels::finish`].
    ///
    /// # Errors
    /// [`KernelError`] if the device fails, or failed in earlier work.
    fn finish(&self, event: Event) -> Result<(), KernelError>;

    /// As [`crate::Kernels::begin_section`].
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    fn begin_section(&self, _section: Section) -> Result<(), KernelError> {
        Ok(())
    }

    /// As [`crate::Kernels::end_section`].
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    fn end_section(&self, _is_whole: bool) -> Result<(), KernelError> {
        Ok(())
    }

    /// As [`crate::Kernels::section_refusal`].
    fn section_refusal(&self) -> Option<String> {
        None
    }
}
