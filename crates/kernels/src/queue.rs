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

/// Bytes that crossed between disk, host, device and other ranks since the device was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes from the host to the device.
    pub h2d_bytes: u64,
    /// Bytes from the device to the host.
    pub d2h_bytes: u64,
    /// Bytes from this rank to others.
    pub sent_bytes: u64,
    /// Bytes from files to the host.
    pub disk_read_bytes: u64,
    /// Bytes from the host to files.
    pub disk_written_bytes: u64,
}

impl Traffic {
    /// The bytes that crossed since an earlier count.
    pub fn since(self, earlier: Traffic) -> Traffic {
        self.with(earlier, |now, earlier| now - earlier)
    }

    /// The bytes of this many equal parts.
    pub fn times(self, parts: usize) -> Traffic {
        self.with(self, |bytes, _| bytes * parts as u64)
    }

    /// The sum of both counts.
    pub fn plus(self, other: Traffic) -> Traffic {
        self.with(other, |bytes, more| bytes + more)
    }

    /// This many bytes in a queue of copies.
    ///
    /// # Panics
    /// If the queue copies nothing.
    pub fn of(queue: Queue, bytes: u64) -> Traffic {
        let mut traffic = Traffic::default();
        match queue {
            Queue::Upload => traffic.h2d_bytes = bytes,
            Queue::Download => traffic.d2h_bytes = bytes,
            Queue::Collective => traffic.sent_bytes = bytes,
            Queue::DiskRead => traffic.disk_read_bytes = bytes,
            Queue::DiskWrite => traffic.disk_written_bytes = bytes,
            Queue::Compute | Queue::Update => unreachable!("nothing is copied there"),
        }
        traffic
    }

    fn with(self, other: Traffic, count: impl Fn(u64, u64) -> u64) -> Traffic {
        Traffic {
            h2d_bytes: count(self.h2d_bytes, other.h2d_bytes),
            d2h_bytes: count(self.d2h_bytes, other.d2h_bytes),
            sent_bytes: count(self.sent_bytes, other.sent_bytes),
            disk_read_bytes: count(self.disk_read_bytes, other.disk_read_bytes),
            disk_written_bytes: count(self.disk_written_bytes, other.disk_written_bytes),
        }
    }
}

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
