//! The device's streams, one a queue, and the events that order them.

use crate::{Event, Queue};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use std::cell::RefCell;
use std::collections::VecDeque;

/// A stream for each queue.
pub(super) struct Streams {
    handles: [sys::CUstream; Queue::ALL.len()],
    histories: [RefCell<History>; Queue::ALL.len()],
    /// CUDA's events that are over, to be recorded again.
    idle: RefCell<Vec<sys::CUevent>>,
}

/// What was recorded in a stream.
#[derive(Default)]
struct History {
    /// Number of events so far.
    recorded: u64,
    /// Those that were not over when last looked at, in their order.
    pending: VecDeque<(u64, sys::CUevent)>,
}

impl Streams {
    /// Streams of the current context.
    pub(super) fn new() -> Result<Streams, DriverError> {
        let mut streams = Streams {
            handles: [std::ptr::null_mut(); Queue::ALL.len()],
            histories: Default::default(),
            idle: RefCell::default(),
        };
        for handle in &mut streams.handles {
            *handle = result::stream::create(result::stream::StreamKind::NonBlocking)?;
        }
        Ok(streams)
    }

    pub(super) fn of(&self, queue: Queue) -> sys::CUstream {
        self.handles[queue as usize]
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
        while let Some((_, event)) = history.pending.front() {
            // SAFETY: the event was created below.
            match unsafe { result::event::query(*event) } {
                Ok(()) => idle.extend(history.pending.pop_front().map(|(_, event)| event)),
                Err(_) => break,
            }
        }
        let event = match idle.pop() {
            Some(event) => event,
            None => result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?,
        };
        // SAFETY: event and stream were created by this device and live.
        unsafe { result::event::record(event, self.of(queue)) }?;
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
        history.pending.get(index as usize).map(|(_, event)| *event)
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
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::synchronize(self.of(queue)) }
    }

    /// Called once, when nothing uses the streams any more.
    pub(super) fn destroy(&self) {
        let histories = self
            .histories
            .iter()
            .flat_map(|history| history.take().pending);
        let events = histories.map(|(_, event)| event).chain(self.idle.take());
        for event in events {
            // SAFETY: created in `record`, and destroyed once.
            let _ = unsafe { result::event::destroy(event) };
        }
        for handle in self.handles {
            // SAFETY: created in `new`.
            let _ = unsafe { result::stream::destroy(handle) };
        }
    }
}
