//! The interface of a device to [`Kernels`](crate::Kernels).

use crate::{Event, ExchangeBytes, KernelError, Queue, Reading, Request, Section, Target, Traffic};
use memory::{In, Out};
use std::cell::Cell;

/// A device that carries out what [`Kernels`](crate::Kernels) has checked.
///
/// It is made inside a `Kernels`, where every call is checked and counted, once, whichever the device. A backend checks
/// nothing again. It refuses what the device cannot do, and reports what
/// fails; both are [`crate::Fault::Device`], but for a file that fails, [`crate::Fault::Disk`], and for other ranks that
/// cannot be reached, [`crate::Fault::Collective`].
///
/// All but what [`Backend::ask`] asks for in another queue runs in [`Queue::Compute`], in the order in which it was asked for. What an operation writes is borrowed exclusively, so
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

    /// Asks for an operation, a copy or an exchange in the queue where it belongs.
    ///
    /// # Safety
    /// It was checked for this backend. In another queue than [`Queue::Compute`], until an event recorded after this in the
    /// queue is over, all memory of the request stays alive, nothing else writes it, and nothing else reads what it writes.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails or cannot do this, if a file or an exchange has failed, or if there is no group or
    /// no such rank.
    unsafe fn ask(&self, queue: Queue, request: Request) -> Result<(), KernelError>;

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
