//! The queues of a device, and what orders them.

use memory::In;

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
    /// Bytes from the host to the device.
    pub h2d_bytes: u64,
    /// Bytes from the device to the host.
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
    /// When it can be read.
    pub(crate) fn event(&self) -> Event {
        self.event
    }

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

    /// The bytes, once the event is over.
    pub(crate) fn bytes(self) -> Vec<u8> {
        match self.landed {
            Landed::Here(bytes) => bytes,
            // SAFETY: the promise of `after`, and the event is over.
            Landed::There { pointer, bytes } => unsafe {
                std::slice::from_raw_parts(pointer, bytes).to_vec()
            },
        }
    }
}

/// Bytes that a view covers.
pub(crate) fn bytes_of(x: &In) -> usize {
    x.elements() * x.dtype().size_in_bytes()
}
