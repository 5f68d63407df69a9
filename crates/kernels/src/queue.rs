//! The queues of a device, and the events that order them.

/// A queue runs its work in the order of the calls. Only events order work of different queues.
///
/// On CUDA, queues are streams, with a worker thread for each direction of the disk. On the CPU, copies and exchanges
/// have worker threads too. Operations run in the calling thread there, including those of [`Queue::Update`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Queue {
    /// Every operation of [`crate::Kernels`], except those started in [`Queue::Update`].
    Compute,
    /// Updates beside the computation.
    Update,
    /// Copies from pinned host memory to the device.
    Upload,
    /// Copies from the device to pinned host memory.
    Download,
    /// Exchanges with other ranks.
    Collective,
    /// Copies from files to pinned host memory.
    DiskRead,
    /// Copies from pinned host memory to files.
    DiskWrite,
}

impl Queue {
    /// All queues.
    pub const ALL: [Queue; 7] = [
        Queue::Compute,
        Queue::Update,
        Queue::Upload,
        Queue::Download,
        Queue::Collective,
        Queue::DiskRead,
        Queue::DiskWrite,
    ];

    /// Its name in pictures.
    pub fn name(self) -> &'static str {
        match self {
            Queue::Compute => "compute",
            Queue::Update => "update",
            Queue::Upload => "upload",
            Queue::Download => "download",
            Queue::Collective => "collective",
            Queue::DiskRead => "disk read",
            Queue::DiskWrite => "disk write",
        }
    }
}

/// A point in a queue. It is over when all work enqueued before it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The queue.
    pub queue: Queue,
    /// The number of requests to the queue before the point.
    pub position: u64,
}

impl Event {
    /// A point before all work.
    pub const PAST: Event = Event {
        queue: Queue::Compute,
        position: 0,
    };
}

/// The identity of a section that comes again and again: numbers that the caller chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Section(pub [usize; 3]);

/// Most bytes of one reading.
pub const READING_BYTES_MAX: usize = 64 << 10;

/// Most readings that may be running.
pub const READINGS_MAX: usize = 16;

/// Some bytes on their way to the host.
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
    /// The event after which it can be read.
    pub(crate) fn event(&self) -> Event {
        self.event
    }

    /// A reading whose bytes are already here.
    pub fn done(bytes: Vec<u8>) -> Reading {
        Reading {
            event: Event::PAST,
            landed: Landed::Here(bytes),
        }
    }

    /// A reading whose bytes can be read when `event` is over.
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
