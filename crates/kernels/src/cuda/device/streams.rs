//! The device's streams, one a queue, and the events that order them.

use super::handles;
use crate::{Event, Queue};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use std::cell::RefCell;
use std::collections::VecDeque;

/// A stream for each queue.
pub(super) struct Streams {
    // Dropped first: a stream waits for its work.
    streams: Vec<handles::Stream>,
    histories: [RefCell<History>; Queue::ALL.len()],
    /// CUDA's events that are over, to be recorded again.
    idle: RefCell<Vec<handles::Event>>,
}

/// What was recorded in a stream.
#[derive(Default)]
struct History {
    /// Number of events so far.
    recorded: u64,
    /// Those that were not over when last looked at, in their order.
    pending: VecDeque<(u64, handles::Event)>,
}

impl Streams {
    /// Streams of the current context. That of the computation comes first wherever the device has to choose: an
    /// update beside it may wait, and what waits for the computation may not.
    pub(super) fn new() -> Result<Streams, DriverError> {
        let streams = Queue::ALL.iter().map(|queue| match queue {
            Queue::Compute => handles::Stream::first(),
            Queue::Upload | Queue::Download | Queue::Update => handles::Stream::new(),
        });
        Ok(Streams {
            streams: streams.collect::<Result<_, _>>()?,
            histories: Default::default(),
            idle: RefCell::default(),
        })
    }

    pub(super) fn of(&self, queue: Queue) -> sys::CUstream {
        self.streams[queue as usize].handle()
    }

    /// # Safety
    /// As for [`crate::cuda::Driver::start_copy`].
    pub(super) unsafe fn copy(
        &self,
        queue: Queue,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), DriverError> {
        let stream = self.of(queue);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let asked = unsafe {
            match queue {
                Queue::Upload => sys::cuMemcpyHtoDAsync_v2(to as u64, from.cast(), bytes, stream),
                Queue::Download => sys::cuMemcpyDtoHAsync_v2(to.cast(), from as u64, bytes, stream),
                Queue::Compute | Queue::Update => unreachable!("copies have queues of their own"),
            }
        };
        asked.result()
    }

    /// The present end of a queue.
    pub(super) fn record(&self, queue: Queue) -> Result<Event, DriverError> {
        let mut history = self.histories[queue as usize].borrow_mut();
        let mut idle = self.idle.borrow_mut();
        let over = |first: &(u64, handles::Event)| first.1.has_come();
        while history.pending.front().is_some_and(over) {
            idle.extend(history.pending.pop_front().map(|(_, event)| event));
        }
        let event = match idle.pop() {
            Some(event) => event,
            None => handles::Event::new()?,
        };
        event.record(self.of(queue))?;
        history.recorded += 1;
        let position = history.recorded;
        history.pending.push_back((position, event));
        Ok(Event { queue, position })
    }

    /// What stands for an event in CUDA; none if it is over.
    fn pending(&self, event: Event) -> Option<sys::CUevent> {
        let history = self.histories[event.queue as usize].borrow();
        let first = history.pending.front()?.0;
        let index = event.position.checked_sub(first)?;
        let (_, event) = history.pending.get(index as usize)?;
        Some(event.handle())
    }

    /// Makes a queue wait for an event of another.
    pub(super) fn wait(&self, queue: Queue, event: Event) -> Result<(), DriverError> {
        match self.pending(event) {
            Some(pending) if event.queue != queue => {
                let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
                // SAFETY: event and stream were created by this device and live.
                unsafe { result::stream::wait_event(self.of(queue), pending, flags) }
            }
            _ => Ok(()),
        }
    }

    /// Waits until an event is over.
    pub(super) fn finish(&self, event: Event) -> Result<(), DriverError> {
        match self.pending(event) {
            // SAFETY: the event was created by this device and lives.
            Some(pending) => unsafe { result::event::synchronize(pending) },
            None => Ok(()),
        }
    }

    /// Waits for everything that was asked for in a queue.
    pub(super) fn synchronize(&self, queue: Queue) -> Result<(), DriverError> {
        self.streams[queue as usize].synchronize()
    }
}
