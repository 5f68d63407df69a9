//! When the queues of a device would be done, by arithmetic on operations and bytes: what copies cost a step that has
//! not run.

use crate::{Event, Queue};
use std::cell::RefCell;
use std::rc::Rc;

/// What time is counted by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Operations of matrix products in a second. Of all else, updates alone take time.
    pub flops: f64,
    /// Bytes in a second that an update reads and writes on the device.
    pub memory: f64,
    /// Bytes in a second to the device, while nothing goes to the host.
    pub upload: f64,
    /// Bytes in a second to the host, while nothing goes to the device.
    pub download: f64,
    /// Bytes in a second both ways together, while both are busy: half of it each.
    pub both_ways: f64,
}

/// The times at which queues are done with what they were asked for, twice: as it is, and as if copies took no time. The
/// host asks for everything in no time. Clones share one timeline.
#[derive(Clone)]
pub struct Timeline(Rc<RefCell<Times>>);

struct Times {
    rates: Rates,
    queues: [Seconds; Queue::ALL.len()],
    /// When each event was over, by its position.
    events: Vec<Seconds>,
}

impl Times {
    /// A queue is busy with something that is no copy.
    fn work(&mut self, queue: Queue, seconds: f64) {
        let queue = &mut self.queues[queue as usize];
        queue.with_copies += seconds;
        queue.without_copies += seconds;
    }
}

/// Seconds since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seconds {
    /// With the time that copies take.
    pub with_copies: f64,
    /// Without it, as if copies took none.
    pub without_copies: f64,
}

impl Seconds {
    fn later(self, other: Seconds) -> Seconds {
        Seconds {
            with_copies: self.with_copies.max(other.with_copies),
            without_copies: self.without_copies.max(other.without_copies),
        }
    }

    /// What passed since an earlier time.
    pub fn since(self, earlier: Seconds) -> Seconds {
        Seconds {
            with_copies: self.with_copies - earlier.with_copies,
            without_copies: self.without_copies - earlier.without_copies,
        }
    }
}

impl Timeline {
    /// A timeline on which nothing has been asked for.
    pub fn new(rates: Rates) -> Timeline {
        Timeline(Rc::new(RefCell::new(Times {
            rates,
            queues: Default::default(),
            // The first stands for the past.
            events: vec![Seconds::default()],
        })))
    }

    /// When the computation is done with what it was asked for.
    pub fn computed(&self) -> Seconds {
        self.0.borrow().queues[Queue::Compute as usize]
    }

    pub(crate) fn compute(&self, flops: u64) {
        let mut times = self.0.borrow_mut();
        let seconds = flops as f64 / times.rates.flops;
        times.work(Queue::Compute, seconds);
    }

    /// An update of parameters: no products, and much memory.
    pub(crate) fn update(&self, queue: Queue, bytes: u64) {
        let mut times = self.0.borrow_mut();
        let seconds = bytes as f64 / times.rates.memory;
        times.work(queue, seconds);
    }

    pub(crate) fn copy(&self, queue: Queue, bytes: usize) {
        let mut times = self.0.borrow_mut();
        let (alone, other) = match queue {
            Queue::Upload => (times.rates.upload, Queue::Download),
            _ => (times.rates.download, Queue::Upload),
        };
        let other_done = times.queues[other as usize].with_copies;
        let together = times.rates.both_ways / 2.0;
        let done = &mut times.queues[queue as usize].with_copies;
        let shared = (bytes as f64).min((other_done - *done).max(0.0) * together);
        *done += shared / together + (bytes as f64 - shared) / alone;
    }

    pub(crate) fn record(&self, queue: Queue) -> Event {
        let mut times = self.0.borrow_mut();
        let now = times.queues[queue as usize];
        times.events.push(now);
        Event {
            queue,
            position: times.events.len() as u64 - 1,
        }
    }

    pub(crate) fn wait(&self, queue: Queue, event: Event) {
        let mut times = self.0.borrow_mut();
        let over = times.events[event.position as usize];
        let queue = &mut times.queues[queue as usize];
        *queue = queue.later(over);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATES: Rates = Rates {
        flops: 10.0,
        memory: 8.0,
        upload: 4.0,
        download: 2.0,
        both_ways: 4.0,
    };

    #[test]
    fn queues_run_beside_one_another_until_they_wait() {
        let timeline = Timeline::new(RATES);
        timeline.copy(Queue::Upload, 12);
        let came = timeline.record(Queue::Upload);
        timeline.compute(20);
        assert_eq!(timeline.computed().with_copies, 2.0);
        timeline.wait(Queue::Compute, came);
        timeline.wait(Queue::Compute, Event::PAST);
        timeline.compute(10);
        let expected = Seconds {
            with_copies: 4.0,
            without_copies: 3.0,
        };
        assert_eq!(timeline.computed(), expected);
    }

    #[test]
    fn updates_take_the_time_of_their_bytes_beside_the_computation() {
        let timeline = Timeline::new(RATES);
        timeline.update(Queue::Update, 24);
        timeline.compute(20);
        assert_eq!(timeline.computed().without_copies, 2.0);
        timeline.wait(Queue::Compute, timeline.record(Queue::Update));
        assert_eq!(timeline.computed().without_copies, 3.0);
        assert_eq!(timeline.computed().with_copies, 3.0);
    }

    #[test]
    fn copies_are_slower_while_the_other_way_is_busy() {
        let timeline = Timeline::new(RATES);
        timeline.copy(Queue::Download, 6);
        // Done after 3 s: until then 2 bytes a second come, 4 thereafter.
        timeline.copy(Queue::Upload, 14);
        timeline.wait(Queue::Compute, timeline.record(Queue::Upload));
        assert_eq!(timeline.computed().with_copies, 5.0);
    }
}
