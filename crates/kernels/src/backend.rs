//! The interface of a device to [`Kernels`](crate::Kernels).

use crate::{Event, ExchangeBytes, Queue, Reading, Request, Result, Section, Target};
use memory::{In, Out};
use std::time::{Duration, Instant};

/// The queues of a device, and the events that order them. By default, a device finishes every call before it returns, and launches
/// nothing as a whole. A method fails if the device fails, or failed in earlier work.
pub trait Queues {
    /// This device's rank in its group; 0 without one.
    fn rank(&self) -> usize {
        0
    }

    /// As [`crate::Kernels::record`].
    fn record(&self, _queue: Queue) -> Result<Event> {
        Ok(Event::PAST)
    }

    /// As [`crate::Kernels::wait`].
    fn wait(&self, _queue: Queue, _event: Event, _reason: &'static str) -> Result {
        Ok(())
    }

    /// As [`crate::Kernels::finish`].
    fn finish(&self, _event: Event) -> Result {
        Ok(())
    }

    /// Whether an event is over, as far as that can be told without waiting.
    fn is_over(&self, _event: Event) -> bool {
        true
    }

    /// As [`crate::Kernels::timed`], by the device's own clock; none if it has none for the queue, and nothing is done.
    fn timed(&self, _queue: Queue, _work: TimedWork) -> Option<Result<Duration>> {
        None
    }

    /// As [`crate::Kernels::begin_section`].
    fn begin_section(&self, _section: Section) -> Result {
        Ok(())
    }

    /// As [`crate::Kernels::end_section`].
    fn end_section(&self, _is_whole: bool) -> Result {
        Ok(())
    }

    /// As [`crate::Kernels::section_refusal`].
    fn section_refusal(&self) -> Option<String> {
        None
    }
}

/// Work whose time is taken.
pub(crate) type TimedWork<'a> = &'a mut dyn FnMut() -> Result;

/// The time of work in any queue: by the device's clock, or else by the host's, its launch and the wait for its end included.
pub(crate) fn time(
    queues: &(impl Queues + ?Sized),
    queue: Queue,
    work: TimedWork,
) -> Result<Duration> {
    if let Some(by_device) = queues.timed(queue, work) {
        return by_device;
    }
    // Earlier work in the queue does not count, such as uploads of a batch or the wait for a copy.
    queues.finish(queues.record(queue)?)?;
    let start = Instant::now();
    work()?;
    queues.finish(queues.record(queue)?)?;
    Ok(start.elapsed())
}

/// A device that carries out what [`Kernels`](crate::Kernels) has checked.
///
/// It is made inside a `Kernels`, which checks and counts every call once, for all devices. A backend does not check
/// again. It refuses what the device cannot do, and reports failures: [`crate::Fault::Device`], for a file
/// [`crate::Fault::Disk`], and for ranks that cannot be reached [`crate::Fault::Collective`].
///
/// Requests run in [`Queue::Compute`], in the order of the calls, unless [`Backend::ask`] names another queue. An
/// operation's outputs are borrowed exclusively, so they overlap none of its other views. Its inputs may overlap.
///
/// A device that runs ahead uses these views after the call has returned. It may, since leases are granted in the order
/// of [`Queue::Compute`]: until an operation has run, later ones in that queue do not change its memory.
pub trait Backend: Queues {
    /// The device whose scratch sizes apply.
    fn target(&self) -> Target;

    /// Whether operations may still be unfinished when the call that asks for them returns.
    fn runs_ahead(&self) -> bool;

    /// Whether the device widens bf16 operands of matrix products in a workspace, as the processor does.
    fn widens(&self) -> bool;

    /// Asks for an operation, a copy or an exchange in its queue.
    ///
    /// # Safety
    /// It was checked for this backend. In another queue than [`Queue::Compute`], until an event recorded after this in the
    /// queue is over, all memory of the request stays alive, nothing else writes it, and nothing else reads what it writes.
    ///
    /// # Errors
    /// [`crate::KernelError`] if the device fails or cannot do this, if a file or an exchange has failed, or if there is no group or
    /// no such rank.
    unsafe fn ask(&self, queue: Queue, request: Request) -> Result;

    /// Copies host bytes, which may change when this returns, into a tensor.
    ///
    /// # Safety
    /// `out` is contiguous and has as many bytes.
    ///
    /// # Errors
    /// [`crate::KernelError`] if the device fails.
    unsafe fn write(&self, out: Out, bytes: &[u8]) -> Result;

    /// Copies a tensor to the host after all earlier work is done.
    ///
    /// # Safety
    /// `x` is contiguous and has as many bytes.
    ///
    /// # Errors
    /// [`crate::KernelError`] if the device fails, or failed in earlier work.
    unsafe fn read(&self, bytes: &mut [u8], x: In) -> Result;

    /// Starts to copy a tensor's contents to the host.
    ///
    /// # Safety
    /// `x` is contiguous and has at most [`crate::READING_BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// [`crate::KernelError`] if the device fails.
    unsafe fn start_reading(&self, x: In) -> Result<Reading>;

    /// Whether exchanges among all ranks have to say with whom, because the backend keeps time with them.
    fn keeps_time_with_others(&self) -> bool {
        false
    }

    /// Counts an exchange of this many bytes, if the backend moves no pieces itself. Returns false if it does.
    fn counts_exchange(&self, _bytes: ExchangeBytes) -> bool {
        false
    }
}
