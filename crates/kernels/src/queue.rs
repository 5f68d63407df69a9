//! The queues of a device, and what orders them.

use crate::backend::{Backed, Backend};
use crate::{KernelError, check};
use memory::{In, Out};

/// Where work runs in the order in which it was asked for. Between queues nothing is ordered but by events.
///
/// On CUDA, streams. On the CPU a worker thread for each direction of copies, while operations run in the thread that
/// asks for them, those of [`Queue::Update`] too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Queue {
    /// Every operation of [`crate::Kernels`] but [`crate::Kernels::start_adamw`].
    Compute,
    /// Updates beside the computation.
    Update,
    /// Copies from pinned host memory to the device.
    Upload,
    /// Copies from the device to pinned host memory.
    Download,
}

impl Queue {
    /// All queues.
    pub const ALL: [Queue; 4] = [
        Queue::Compute,
        Queue::Update,
        Queue::Upload,
        Queue::Download,
    ];
}

/// A point in a queue: it is over when everything that was asked for in the queue before it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The queue.
    pub queue: Queue,
    /// The number of things asked for in the queue before the point.
    pub position: u64,
}

impl Event {
    /// A point before all work.
    pub const PAST: Event = Event {
        queue: Queue::Compute,
        position: 0,
    };
}

/// Bytes that crossed between host and device since the device was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// From the host to the device.
    pub h2d_bytes: u64,
    /// From the device to the host.
    pub d2h_bytes: u64,
}

impl Traffic {
    /// What crossed since an earlier count.
    pub fn since(self, earlier: Traffic) -> Traffic {
        Traffic {
            h2d_bytes: self.h2d_bytes - earlier.h2d_bytes,
            d2h_bytes: self.d2h_bytes - earlier.d2h_bytes,
        }
    }

    /// What crosses in so many equal parts.
    pub fn times(self, parts: usize) -> Traffic {
        Traffic {
            h2d_bytes: self.h2d_bytes * parts as u64,
            d2h_bytes: self.d2h_bytes * parts as u64,
        }
    }

    /// Both counts together.
    pub fn plus(self, other: Traffic) -> Traffic {
        Traffic {
            h2d_bytes: self.h2d_bytes + other.h2d_bytes,
            d2h_bytes: self.d2h_bytes + other.d2h_bytes,
        }
    }
}

/// Most bytes of one reading.
pub const READING_BYTES_MAX: usize = 64;

/// Most readings that may be under way.
pub const READINGS_MAX: usize = 16;

/// A few bytes on their way to the host.
#[derive(Debug)]
pub struct Reading {
    event: Event,
    landed: Landed,
}

#[derive(Debug)]
enum Landed {
    Here(Vec<u8>),
    There { pointer: *const u8, bytes: usize },
}

impl Reading {
    /// Bytes that have been read.
    pub fn done(bytes: Vec<u8>) -> Reading {
        Reading {
            event: Event::PAST,
            landed: Landed::Here(bytes),
        }
    }

    /// Bytes that can be read when `event` is over.
    ///
    /// # Safety
    /// `pointer` starts as many bytes of host memory, which stay as they are for [`READINGS_MAX`] readings after the
    /// event.
    pub unsafe fn after(event: Event, pointer: *const u8, bytes: usize) -> Reading {
        Reading {
            event,
            landed: Landed::There { pointer, bytes },
        }
    }

    /// Called when the event is over.
    fn bytes(self) -> Vec<u8> {
        match self.landed {
            Landed::Here(bytes) => bytes,
            // SAFETY: the promise of `after`, and the event is over.
            Landed::There { pointer, bytes } => unsafe {
                std::slice::from_raw_parts(pointer, bytes).to_vec()
            },
        }
    }
}

/// Copies beside the computation, and the events that order them.
///
/// A copy reads and writes at any time between the call that asks for it and the end of an event recorded after it in
/// its queue. Leases are given out in the order of [`Queue::Compute`]: device memory of a copy may be given back only
/// after that queue was told to wait for such an event, and newly leased memory may be copied into only after the
/// copy's queue was told to wait for an event of [`Queue::Compute`] that is later than the lease.
///
/// What a [`Backend`] has, and nothing else: here calls are checked and counted.
pub trait Queues: Backed {
    /// Whether operations may still have to be done when the call that asks for them returns.
    fn runs_ahead(&self) -> bool {
        self.backend().runs_ahead()
    }

    /// Asks for a copy of pinned host memory to the device, in [`Queue::Upload`]. Both sides are contiguous and of
    /// one type and number of elements.
    ///
    /// # Safety
    /// Until an event recorded after this in the queue is over, `out` and `x` stay alive, nothing else writes either,
    /// and nothing reads `out`.
    ///
    /// # Errors
    /// [`KernelError`] if the sides do not fit, or the device fails.
    unsafe fn start_upload(&self, out: Out, x: In) -> Result<(), KernelError> {
        check::start_copy("start_upload", &out, &x)?;
        count_upload(self.backend(), bytes_of(&x));
        // SAFETY: the caller's promise, and the sides fit.
        unsafe { self.backend().copy_beside(Queue::Upload, out, x) }
    }

    /// Asks for a copy of device memory to pinned host memory, in [`Queue::Download`]; else as
    /// [`Queues::start_upload`].
    ///
    /// # Safety
    /// As for [`Queues::start_upload`].
    ///
    /// # Errors
    /// As for [`Queues::start_upload`].
    unsafe fn start_download(&self, out: Out, x: In) -> Result<(), KernelError> {
        check::start_copy("start_download", &out, &x)?;
        count_download(self.backend(), bytes_of(&x));
        // SAFETY: the caller's promise, and the sides fit.
        unsafe { self.backend().copy_beside(Queue::Download, out, x) }
    }

    /// Asks for the contents of a small contiguous tensor, in [`Queue::Compute`].
    ///
    /// # Errors
    /// [`KernelError`] if the tensor is strided or larger than [`READING_BYTES_MAX`], or the device fails.
    fn start_read(&self, x: In) -> Result<Reading, KernelError> {
        check::start_read(&x)?;
        count_download(self.backend(), bytes_of(&x));
        // SAFETY: the tensor is contiguous and small.
        unsafe { self.backend().start_reading(x) }
    }

    /// Waits for what [`Queues::start_read`] asked for. At most [`READINGS_MAX`] may be under way.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails, or failed in earlier work.
    fn finish_read(&self, reading: Reading) -> Result<Vec<u8>, KernelError> {
        self.finish(reading.event)?;
        Ok(reading.bytes())
    }

    /// The present end of a queue.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    fn record(&self, queue: Queue) -> Result<Event, KernelError> {
        self.backend().record(queue)
    }

    /// Everything that is asked for in `queue` from now on waits for an event; the caller does not. `reason` says
    /// what would go wrong otherwise, for traces and tests.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    fn wait(&self, queue: Queue, event: Event, reason: &'static str) -> Result<(), KernelError> {
        self.backend().wait(queue, event, reason)
    }

    /// Waits until an event is over.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails, or failed in earlier work.
    fn finish(&self, event: Event) -> Result<(), KernelError> {
        self.backend().finish(event)
    }

    /// What has crossed, uploads and downloads of [`crate::Kernels`] included.
    fn traffic(&self) -> Traffic {
        self.backend().traffic().get()
    }
}

impl<B: Backend> Queues for B {}

/// Counts bytes that go to the device.
pub(crate) fn count_upload(backend: &dyn Backend, bytes: usize) {
    count(backend, bytes, 0);
}

/// Counts bytes that come from the device.
pub(crate) fn count_download(backend: &dyn Backend, bytes: usize) {
    count(backend, 0, bytes);
}

fn count(backend: &dyn Backend, uploaded: usize, downloaded: usize) {
    let more = Traffic {
        h2d_bytes: uploaded as u64,
        d2h_bytes: downloaded as u64,
    };
    let counter = backend.traffic();
    counter.set(counter.get().plus(more));
}

/// Bytes that a view covers.
pub(crate) fn bytes_of(x: &In) -> usize {
    x.elements() * x.dtype().size_in_bytes()
}
