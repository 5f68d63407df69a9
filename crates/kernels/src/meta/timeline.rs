//! When the queues of a device would be done, by arithmetic on operations and bytes: what copies cost a step that has
//! not run.

use crate::{Cost, Event, Operation, Queue};
use memory::Place;
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

/// What time is counted by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Operations of matrix products in a second.
    pub flops: f64,
    /// Bytes in a second that an operation reads and writes on the device. It takes as long as its products or its bytes,
    /// whichever is longer (Williams et al. 2009, the roofline).
    pub memory: f64,
    /// Bytes in a second to the device, while nothing goes to the host.
    pub upload: f64,
    /// Bytes in a second to the host, while nothing goes to the device.
    pub download: f64,
    /// Bytes in a second both ways together, while both are busy: half of it each.
    pub both_ways: f64,
    /// Bytes in a second from and to the disk, both ways together: half of it each while both are busy.
    pub disk: f64,
    /// Bytes in a second that a rank sends to others while as many come.
    pub link: f64,
}

/// The times at which queues are done with what they were asked for, twice: as it is, and as if copies and exchanges took
/// no time. The host asks for everything in no time. Clones share one timeline.
#[derive(Clone)]
pub struct Timeline(Rc<RefCell<Times>>);

/// Seconds that operations were measured to take, by name and sizes: they count instead of rates.
pub type Measured = HashMap<(String, Vec<usize>), f64>;

/// Something that a queue was busy with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The queue.
    pub queue: Queue,
    /// The operation's name, `copy` or `exchange`.
    pub name: &'static str,
    /// What was going on when it was asked for.
    pub place: Place,
    /// When it began, in seconds.
    pub start_s: f64,
    /// When it was over.
    pub end_s: f64,
}

/// Events that are remembered: those of many steps, of which one waits for the one before at the most.
const EVENTS_MAX: usize = 1 << 20;

/// What a copy is called among spans.
pub(crate) const COPY: &str = "copy";

/// What an exchange with other ranks is called among spans.
pub(crate) const EXCHANGE: &str = "exchange";

struct Times {
    rates: Rates,
    measured: Measured,
    queues: [Seconds; Queue::ALL.len()],
    /// When the latest events were over, in their order.
    events: VecDeque<Seconds>,
    /// Events before these, which are long over.
    forgotten: u64,
    /// What queues were busy with, where somebody wants to know.
    spans: Option<Vec<Span>>,
}

impl Times {
    /// A queue is busy with something that is no copy.
    fn work(&mut self, queue: Queue, name: &'static str, place: Place, seconds: f64) {
        let times = &mut self.queues[queue as usize];
        let start_s = times.with_copies;
        times.with_copies += seconds;
        times.without_copies += seconds;
        self.note(queue, name, place, start_s);
    }

    /// Notes what a queue was busy with until now.
    fn note(&mut self, queue: Queue, name: &'static str, place: Place, start_s: f64) {
        let end_s = self.queues[queue as usize].with_copies;
        if let Some(spans) = self.spans.as_mut().filter(|_| end_s > start_s) {
            spans.push(Span {
                queue,
                name,
                place,
                start_s,
                end_s,
            });
        }
    }

    fn seconds(&self, operation: &Operation) -> f64 {
        let measured = || {
            let key = (operation.name().to_string(), operation.sizes());
            self.measured.get(&key).copied()
        };
        let known = (!self.measured.is_empty()).then(measured).flatten();
        let Cost { flops, bytes } = operation.cost();
        let least = (flops as f64 / self.rates.flops).max(bytes as f64 / self.rates.memory);
        known.unwrap_or(least)
    }
}

/// Seconds since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seconds {
    /// As the links of a device give them, copies and exchanges included.
    pub with_copies: f64,
    /// As if copies and exchanges took none: the difference is what waits for them.
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
        Timeline::with_measured(rates, Measured::new())
    }

    /// A timeline on which some operations take what they were measured to take.
    pub fn with_measured(rates: Rates, measured: Measured) -> Timeline {
        Timeline(Rc::new(RefCell::new(Times {
            rates,
            measured,
            queues: Default::default(),
            // The first stands for the past.
            events: [Seconds::default()].into(),
            forgotten: 0,
            spans: None,
        })))
    }

    /// Forgets what queues were busy with so far, and notes it from here on.
    pub fn keep_spans(&self) {
        self.0.borrow_mut().spans = Some(Vec::new());
    }

    /// What queues were busy with since [`Timeline::keep_spans`], in the order in which it was asked for.
    pub fn take_spans(&self) -> Vec<Span> {
        self.0.borrow_mut().spans.take().unwrap_or_default()
    }

    /// When the computation is done with what it was asked for.
    pub fn computed(&self) -> Seconds {
        self.0.borrow().queues[Queue::Compute as usize]
    }

    /// An operation is asked for.
    pub(crate) fn execute(&self, queue: Queue, operation: &Operation, place: Place) {
        let mut times = self.0.borrow_mut();
        let seconds = times.seconds(operation);
        times.work(queue, operation.name(), place, seconds);
    }

    /// Something is asked for that was measured to take so long.
    pub(crate) fn took(&self, queue: Queue, name: &'static str, place: Place, seconds: f64) {
        self.0.borrow_mut().work(queue, name, place, seconds);
    }

    pub(crate) fn copy(&self, queue: Queue, bytes: usize, place: Place) {
        let mut times = self.0.borrow_mut();
        let rates = times.rates;
        let (alone, both_ways, other) = match queue {
            Queue::Upload => (rates.upload, rates.both_ways, Queue::Download),
            Queue::Download => (rates.download, rates.both_ways, Queue::Upload),
            Queue::DiskRead => (rates.disk, rates.disk, Queue::DiskWrite),
            Queue::DiskWrite => (rates.disk, rates.disk, Queue::DiskRead),
            Queue::Compute | Queue::Update | Queue::Collective => {
                unreachable!("copies have queues of their own")
            }
        };
        let other_done = times.queues[other as usize].with_copies;
        let together = both_ways / 2.0;
        let done = &mut times.queues[queue as usize].with_copies;
        let start_s = *done;
        let shared = (bytes as f64).min((other_done - start_s).max(0.0) * together);
        *done += shared / together + (bytes as f64 - shared) / alone;
        times.note(queue, COPY, place, start_s);
    }

    /// An exchange is asked for in which most bytes go or come: both ways are busy at once.
    pub(crate) fn exchange(&self, bytes: u64, place: Place) {
        let mut times = self.0.borrow_mut();
        let seconds = bytes as f64 / times.rates.link;
        let done = &mut times.queues[Queue::Collective as usize].with_copies;
        let start_s = *done;
        *done += seconds;
        times.note(Queue::Collective, EXCHANGE, place, start_s);
    }

    pub(crate) fn record(&self, queue: Queue) -> Event {
        let mut times = self.0.borrow_mut();
        let now = times.queues[queue as usize];
        times.events.push_back(now);
        if times.events.len() > EVENTS_MAX {
            times.events.pop_front();
            times.forgotten += 1;
        }
        Event {
            queue,
            position: times.forgotten + times.events.len() as u64 - 1,
        }
    }

    pub(crate) fn wait(&self, queue: Queue, event: Event) {
        let mut times = self.0.borrow_mut();
        let position = event.position.checked_sub(times.forgotten);
        let over = position.map_or(Seconds::default(), |position| {
            times.events[position as usize]
        });
        let queue = &mut times.queues[queue as usize];
        *queue = queue.later(over);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memory::Phase;

    const RATES: Rates = Rates {
        flops: 10.0,
        memory: 8.0,
        upload: 4.0,
        download: 2.0,
        both_ways: 4.0,
        disk: 2.0,
        link: 5.0,
    };

    const PLACE: Place = Place {
        phase: Phase::Forward,
        layer: memory::Layer::Whole,
    };

    /// An operation whose products take so long.
    fn compute(timeline: &Timeline, queue: Queue, seconds: f64) {
        timeline.took(queue, "product", PLACE, seconds);
    }

    #[test]
    fn queues_run_beside_one_another_until_they_wait() {
        let timeline = Timeline::new(RATES);
        timeline.keep_spans();
        timeline.copy(Queue::Upload, 12, PLACE);
        let came = timeline.record(Queue::Upload);
        compute(&timeline, Queue::Compute, 2.0);
        assert_eq!(timeline.computed().with_copies, 2.0);
        timeline.wait(Queue::Compute, came);
        timeline.wait(Queue::Compute, Event::PAST);
        compute(&timeline, Queue::Compute, 1.0);
        let spans = timeline.take_spans();
        let spans: Vec<_> = spans
            .iter()
            .map(|span| (span.name, span.start_s, span.end_s))
            .collect();
        assert_eq!(
            spans,
            [
                (COPY, 0.0, 3.0),
                ("product", 0.0, 2.0),
                ("product", 3.0, 4.0)
            ]
        );
        let expected = Seconds {
            with_copies: 4.0,
            without_copies: 3.0,
        };
        assert_eq!(timeline.computed(), expected);
    }

    #[test]
    fn updates_run_beside_the_computation() {
        let timeline = Timeline::new(RATES);
        compute(&timeline, Queue::Update, 3.0);
        compute(&timeline, Queue::Compute, 2.0);
        assert_eq!(timeline.computed().without_copies, 2.0);
        timeline.wait(Queue::Compute, timeline.record(Queue::Update));
        assert_eq!(timeline.computed().without_copies, 3.0);
        assert_eq!(timeline.computed().with_copies, 3.0);
    }

    #[test]
    fn copies_are_slower_while_the_other_way_is_busy() {
        let timeline = Timeline::new(RATES);
        timeline.copy(Queue::Download, 6, PLACE);
        // Done after 3 s: until then 2 bytes a second come, 4 thereafter.
        timeline.copy(Queue::Upload, 14, PLACE);
        timeline.wait(Queue::Compute, timeline.record(Queue::Upload));
        assert_eq!(timeline.computed().with_copies, 5.0);
    }

    #[test]
    fn both_ways_share_the_disk_and_links_do_not_slow_it() {
        let timeline = Timeline::new(RATES);
        timeline.copy(Queue::Upload, 40, PLACE);
        timeline.copy(Queue::DiskRead, 6, PLACE);
        // Done after 3 s: until then 1 byte a second goes, 2 thereafter.
        timeline.copy(Queue::DiskWrite, 5, PLACE);
        timeline.wait(Queue::Compute, timeline.record(Queue::DiskWrite));
        let expected = Seconds {
            with_copies: 4.0,
            without_copies: 0.0,
        };
        assert_eq!(timeline.computed(), expected);
    }
}
