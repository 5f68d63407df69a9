//! What the driver hands out and wants back: each is given back when it is dropped, also where something after it
//! was refused.
//!
//! A failure to give back is one of earlier work, and was or will be told there.

use cudarc::driver::result::stream::StreamKind;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

/// A retained primary context, current in the thread that retained it.
pub(super) struct Context(sys::CUdevice);

impl Context {
    pub(super) fn retain(device: sys::CUdevice) -> Result<Context, DriverError> {
        // SAFETY: the device comes from the driver.
        let context = unsafe { result::primary_ctx::retain(device) }?;
        let retained = Context(device);
        // SAFETY: just retained.
        unsafe { result::ctx::set_current(context) }?;
        Ok(retained)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, in `retain`; whoever owns it drops what uses it before.
        let _ = unsafe { result::primary_ctx::release(self.0) };
    }
}

/// A stream that nothing orders with others but events.
pub(super) struct Stream(sys::CUstream);

impl Stream {
    /// A stream of the current context, of the lowest priority.
    pub(super) fn new() -> Result<Stream, DriverError> {
        let (least, _) = result::stream::get_priority_range()?;
        result::stream::create_with_priority(StreamKind::NonBlocking, least).map(Stream)
    }

    /// A stream of the highest priority.
    pub(super) fn first() -> Result<Stream, DriverError> {
        let (_, greatest) = result::stream::get_priority_range()?;
        result::stream::create_with_priority(StreamKind::NonBlocking, greatest).map(Stream)
    }

    /// The handle for calls of the driver, as long as `self` lives.
    pub(super) fn handle(&self) -> sys::CUstream {
        self.0
    }

    /// Waits for everything that was asked for.
    pub(super) fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: created in `new`.
        unsafe { result::stream::synchronize(self.0) }
    }
}

impl Drop for Stream {
    /// Waits first: the memory that it works on may go next.
    fn drop(&mut self) {
        let _ = self.synchronize();
        // SAFETY: created in `new`.
        let _ = unsafe { result::stream::destroy(self.0) };
    }
}

/// A point of a stream; one that was never recorded has come.
pub(super) struct Event(sys::CUevent);

impl Event {
    /// An event of the current context that orders, and takes no time.
    pub(super) fn new() -> Result<Event, DriverError> {
        result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).map(Event)
    }

    /// An event of the current context that takes the time.
    pub(super) fn timed() -> Result<Event, DriverError> {
        result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).map(Event)
    }

    /// The handle for calls of the driver, as long as `self` lives.
    pub(super) fn handle(&self) -> sys::CUevent {
        self.0
    }

    /// Puts it at the present end of a stream.
    pub(super) fn record(&self, stream: sys::CUstream) -> Result<(), DriverError> {
        // SAFETY: created above; streams live as long as their device.
        unsafe { result::event::record(self.0, stream) }
    }

    /// Whether the event has come, which it never has where earlier work failed.
    pub(super) fn has_come(&self) -> bool {
        // SAFETY: created above.
        unsafe { result::event::query(self.0) }.is_ok()
    }

    /// Waits until it has come.
    pub(super) fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: created above.
        unsafe { result::event::synchronize(self.0) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created above.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}
