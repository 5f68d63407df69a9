//! What the driver hands out and wants back: each is given back when it is dropped, also where something after it
//! was refused.
//!
//! A failure to give back is one of earlier work, and was or will be told there.

use cudarc::driver::result::stream::StreamKind;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

/// Makes the primary context of a device current in this thread.
///
/// It is retained when the first one asks for it, and never released: cuBLASLt and cuDNN load code into it, which they
/// believe to be there for as long as the process lives, whatever is opened and closed in between.
pub(super) fn enter_primary_context(device: sys::CUdevice) -> Result<(), DriverError> {
    static RETAINED: Mutex<Vec<(sys::CUdevice, Current)>> = Mutex::new(Vec::new());
    let mut retained = RETAINED.lock().expect("nobody panics over it");
    let known = retained.iter().find(|(of, _)| *of == device);
    let context = match known {
        Some((_, context)) => *context,
        None => {
            // SAFETY: the device comes from the driver.
            let context = Current(unsafe { result::primary_ctx::retain(device) }?);
            retained.push((device, context));
            context
        }
    };
    context.set()
}

/// A primary context, for any thread.
#[derive(Clone, Copy)]
pub(super) struct Current(sys::CUcontext);

// SAFETY: a context may be current in several threads, and is never released.
unsafe impl Send for Current {}

impl Current {
    pub(super) fn new() -> Result<Current, DriverError> {
        let current = result::ctx::get_current()?;
        let none = DriverError(sys::CUresult::CUDA_ERROR_INVALID_CONTEXT);
        current.map(Current).ok_or(none)
    }

    /// Makes it the context of this thread.
    pub(super) fn set(self) -> Result<(), DriverError> {
        // SAFETY: retained for as long as the process lives.
        unsafe { result::ctx::set_current(self.0) }
    }
}

/// Numbers in page-locked memory, 0 at first, which the host raises and streams look at.
pub(super) struct Counters {
    first: NonNull<AtomicU32>,
    count: usize,
}

// SAFETY: they are atomic, and live until they are dropped.
unsafe impl Send for Counters {}
// SAFETY: as above.
unsafe impl Sync for Counters {}

impl Counters {
    /// What so many numbers take.
    pub(super) const fn bytes(count: usize) -> usize {
        count * size_of::<AtomicU32>()
    }

    /// So many numbers, for the current context.
    pub(super) fn new(count: usize) -> Result<Counters, DriverError> {
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: nothing reads the memory before it is zeroed below.
        let block = unsafe { result::malloc_host(Counters::bytes(count), flags) }?;
        let first = NonNull::new(block.cast::<AtomicU32>());
        let first = first.ok_or(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY))?;
        for index in 0..count {
            // SAFETY: within the block, which begins at a page.
            unsafe { first.add(index).write(AtomicU32::new(0)) };
        }
        Ok(Counters { first, count })
    }

    fn get(&self, index: usize) -> &AtomicU32 {
        assert!(index < self.count, "there are {} numbers", self.count);
        // SAFETY: within the block, written in `new`, and borrowed no longer than `self`.
        unsafe { self.first.add(index).as_ref() }
    }

    /// Raises a number, after everything that this thread has written.
    pub(super) fn set(&self, index: usize, value: u32) {
        self.get(index).store(value, Ordering::Release);
    }

    /// Makes a stream wait until a number has come to a value, or beyond it by less than half of all numbers.
    pub(super) fn wait(
        &self,
        stream: sys::CUstream,
        index: usize,
        value: u32,
    ) -> Result<(), DriverError> {
        // With unified addresses, which every device has that is opened, the device knows it by the same one.
        let address = self.get(index).as_ptr() as u64;
        let flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the number outlives the streams of its device.
        unsafe { sys::cuStreamWaitValue32_v2(stream, address, value, flags) }.result()
    }
}

impl Drop for Counters {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`; streams and workers are gone.
        let _ = unsafe { result::free_host(self.first.as_ptr().cast()) };
    }
}

/// A stream that captures what it is asked for, until it is told to end.
pub(super) struct Capture(sys::CUstream);

impl Capture {
    /// Has a stream, and those that wait for it, capture what this thread asks of them.
    pub(super) fn begin(stream: sys::CUstream) -> Result<Capture, DriverError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: streams live as long as their device.
        unsafe { sys::cuStreamBeginCapture_v2(stream, mode) }.result()?;
        Ok(Capture(stream))
    }

    /// What was captured, ready to be launched, with the device memory that it needs.
    pub(super) fn end(self) -> Result<Graph, DriverError> {
        let stream = self.0;
        std::mem::forget(self);
        let captured = Captured::of(stream)?;
        let mut ready = std::ptr::null_mut();
        // SAFETY: writes one handle; what was captured lives until the end of this function.
        unsafe { sys::cuGraphInstantiateWithFlags(&mut ready, captured.0, 0) }.result()?;
        let graph = Graph(ready);
        // Else the first launch would take that memory, where a refusal comes too late to do without a graph.
        // SAFETY: just instantiated; streams live as long as their device.
        unsafe { sys::cuGraphUpload(graph.0, stream) }.result()?;
        Ok(graph)
    }
}

impl Drop for Capture {
    /// A capture that failed ends too, or the stream would never work again.
    fn drop(&mut self) {
        let _ = Captured::of(self.0);
    }
}

/// A graph that cannot be launched yet.
struct Captured(sys::CUgraph);

impl Captured {
    fn of(stream: sys::CUstream) -> Result<Captured, DriverError> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: writes one handle; streams live as long as their device.
        let ended = unsafe { sys::cuStreamEndCapture(stream, &mut graph) }.result();
        let captured = Captured(graph);
        ended.map(|()| captured)
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the driver handed it out in `of`.
            let _ = unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

/// Work that is asked for as one.
pub(super) struct Graph(sys::CUgraphExec);

impl Graph {
    /// Asks for all of it, in the order of a stream.
    pub(super) fn launch(&self, stream: sys::CUstream) -> Result<(), DriverError> {
        // SAFETY: instantiated in `Capture::end`; whoever captured it answers for what it works on.
        unsafe { sys::cuGraphLaunch(self.0, stream) }.result()
    }
}

impl Drop for Graph {
    /// The driver keeps what is under way until it is done.
    fn drop(&mut self) {
        // SAFETY: instantiated in `Capture::end`.
        let _ = unsafe { sys::cuGraphExecDestroy(self.0) };
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

// SAFETY: the driver may be asked about an event from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

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

    /// Has a stream wait for where it was put last.
    pub(super) fn hold_back(&self, stream: sys::CUstream) -> Result<(), DriverError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: created above; streams live as long as their device.
        unsafe { result::stream::wait_event(stream, self.0, flags) }
    }

    /// Whether the event has come, which it never has where earlier work failed.
    pub(super) fn has_come(&self) -> bool {
        self.query().is_ok()
    }

    /// Nothing if the event has come, `CUDA_ERROR_NOT_READY` if it will, and another error if it never does.
    pub(super) fn query(&self) -> Result<(), DriverError> {
        // SAFETY: created above.
        unsafe { result::event::query(self.0) }
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
