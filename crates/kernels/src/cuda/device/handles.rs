//! Handles of the driver. Each is released when dropped, also if a later step of opening fails.
//!
//! Errors of a release are those of earlier work, which reports them itself.

use cudarc::driver::result::stream::StreamKind;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

/// Makes the primary context of a device current in this thread.
///
/// The context is retained at the first call and never released. cuBLASLt loads code into it, and assumes that
/// it stays for the life of the process, even if devices are closed and opened in between.
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

/// Numbers in page-locked memory, 0 at first. The host raises them, and streams wait for them.
pub(super) struct Counters {
    first: NonNull<AtomicU32>,
    count: usize,
}

// SAFETY: they are atomic, and live until they are dropped.
unsafe impl Send for Counters {}
// SAFETY: as above.
unsafe impl Sync for Counters {}

impl Counters {
    /// Bytes of `count` numbers.
    pub(super) const fn bytes(count: usize) -> usize {
        count * size_of::<AtomicU32>()
    }

    /// Makes `count` numbers for the current context.
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

    /// Raises a number, after all writes that this thread made before.
    pub(super) fn set(&self, index: usize, value: u32) {
        self.get(index).store(value, Ordering::Release);
    }

    /// Makes a stream wait until a number has reached a value. A number that is ahead by less than half of its range
    /// counts as having reached it.
    pub(super) fn wait(
        &self,
        stream: sys::CUstream,
        index: usize,
        value: u32,
    ) -> Result<(), DriverError> {
        // All devices that we open have unified addresses, so the device uses the same address.
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

/// A stream in capture mode, until the capture ends.
pub(super) struct Capture(sys::CUstream);

impl Capture {
    /// Starts a capture of what this thread enqueues in a stream, and in streams that wait for it.
    pub(super) fn begin(stream: sys::CUstream) -> Result<Capture, DriverError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: streams live as long as their device.
        unsafe { sys::cuStreamBeginCapture_v2(stream, mode) }.result()?;
        Ok(Capture(stream))
    }

    /// Ends the capture. The graph is ready to launch and has its device memory.
    pub(super) fn end(self) -> Result<Graph, DriverError> {
        let stream = self.0;
        std::mem::forget(self);
        let captured = Captured::of(stream)?;
        let mut ready = std::ptr::null_mut();
        // SAFETY: writes one handle; what was captured lives until the end of this function.
        unsafe { sys::cuGraphInstantiateWithFlags(&mut ready, captured.0, 0) }.result()?;
        let graph = Graph(ready);
        // Otherwise the first launch would take that memory, when it is too late to go on without a graph.
        // SAFETY: just instantiated; streams live as long as their device.
        unsafe { sys::cuGraphUpload(graph.0, stream) }.result()?;
        Ok(graph)
    }
}

impl Drop for Capture {
    /// A failed capture must end too, or the stream would never work again.
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

/// Work that is launched as a whole.
pub(super) struct Graph(sys::CUgraphExec);

impl Graph {
    /// Launches all of it, in the order of a stream.
    pub(super) fn launch(&self, stream: sys::CUstream) -> Result<(), DriverError> {
        // SAFETY: instantiated in `Capture::end`. The code that captured it ensures that its memory is alive.
        unsafe { sys::cuGraphLaunch(self.0, stream) }.result()
    }
}

impl Drop for Graph {
    /// The driver keeps running work until it is done.
    fn drop(&mut self) {
        // SAFETY: instantiated in `Capture::end`.
        let _ = unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}

/// A stream that is ordered with others only by events.
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

    /// Waits for all work in the stream.
    pub(super) fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: created in `new`.
        unsafe { result::stream::synchronize(self.0) }
    }
}

impl Drop for Stream {
    /// Waits first, because the memory that the work uses may be freed next.
    fn drop(&mut self) {
        let _ = self.synchronize();
        // SAFETY: created in `new`.
        let _ = unsafe { result::stream::destroy(self.0) };
    }
}

/// A point of a stream. An event that was never recorded counts as over.
pub(super) struct Event(sys::CUevent);

// SAFETY: the driver may be asked about an event from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event of the current context, without a time.
    pub(super) fn new() -> Result<Event, DriverError> {
        result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).map(Event)
    }

    /// An event of the current context, with its time.
    pub(super) fn timed() -> Result<Event, DriverError> {
        result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).map(Event)
    }

    /// The handle for calls of the driver, as long as `self` lives.
    pub(super) fn handle(&self) -> sys::CUevent {
        self.0
    }

    /// Records it at the present end of a stream.
    pub(super) fn record(&self, stream: sys::CUstream) -> Result<(), DriverError> {
        // SAFETY: created above; streams live as long as their device.
        unsafe { result::event::record(self.0, stream) }
    }

    /// Makes a stream wait for the event's last record.
    pub(super) fn hold_back(&self, stream: sys::CUstream) -> Result<(), DriverError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: created above; streams live as long as their device.
        unsafe { result::stream::wait_event(stream, self.0, flags) }
    }

    /// Whether the event is over. It never is if earlier work failed.
    pub(super) fn has_come(&self) -> bool {
        self.query().is_ok()
    }

    /// Ok if the event is over, `CUDA_ERROR_NOT_READY` if it will be, and another error if it never will.
    pub(super) fn query(&self) -> Result<(), DriverError> {
        // SAFETY: created above.
        unsafe { result::event::query(self.0) }
    }

    /// Waits until it is over.
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
