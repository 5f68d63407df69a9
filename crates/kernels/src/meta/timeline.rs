//! Computes when the queues of a device would be done, from operations and bytes. It tells how much time copies cost in
//! a step that has not run.

use super::clocks::Clock;
pub use super::clocks::Seconds;
use crate::{Cost, Event, ExchangeBytes, Operation, Queue};
use memory::Place;
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

/// The speeds that times are computed from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Operations of matrix products per second.
    pub flops: f64,
    /// Those of grouped products, whose matrices are a mixture's experts.
    pub grouped_flops: f64,
    /// Those of flash attention, forward and backward.
    pub attention_flops: [f64; 2],
    /// Those of the gated delta rule, in f32.
    pub delta_flops: f64,
    /// Bytes per second that an operation reads and writes on the device. An operation takes the longer of the times
    /// for its products and its bytes (Williams et al. 2009, the roofline).
    pub memory: f64,
    /// Bytes per second to the device, while nothing goes to the host.
    pub upload: f64,
    /// Bytes per second to the host, while nothing goes to the device.
    pub download: f64,
    /// Bytes per second both ways together while both are busy; each way gets half.
    pub both_ways: f64,
    /// Bytes per second from and to the disk together; each way gets half while both are busy.
    pub disk: f64,
    /// Bytes per second that a rank sends to others while it receives as many.
    pub link: f64,
    /// The same among ranks of one machine, which are neighbours.
    pub near_link: f64,
    /// How many ranks a machine has.
    pub near_ranks: usize,
}

/// The times at which queues finish their work, computed twice: with copies and exchanges, and as if these took no
/// time. The host enqueues everything in no time. Clones share one timeline.
#[derive(Clone)]
pub struct Timeline(Rc<RefCell<Times>>);

/// Seconds measured for operations, by name and sizes. They replace the computed times.
pub type Measured = HashMap<(String, Vec<usize>), f64>;

/// A stretch of time in which a queue was busy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The queue.
    pub queue: Queue,
    /// The operation's name, `copy` or `exchange`.
    pub name: &'static str,
    /// Bytes that the operation moves. Copies, exchanges, and work whose time is known otherwise have none.
    pub moved: Option<Moved>,
    /// Where the step was when the work was enqueued.
    pub place: Place,
    /// When it began, in seconds.
    pub start_s: f64,
    /// When it was over.
    pub end_s: f64,
}

/// Bytes that an operation reads and writes on the device, by its contract ([`Cost::bytes`]).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moved {
    /// The operation's group ([`Operation::group`]).
    pub group: &'static str,
    /// Bytes, read and written together.
    pub bytes: u64,
}

/// Number of events that are remembered. They cover many steps, while a step waits at most for events of the one
/// before.
const EVENTS_MAX: usize = 1 << 20;

/// Speed of FP8 products relative to bf16: 1.6 to 1.8 in steps of Qwen2.5-1.5B and Llama-3 8B on an H200
/// (`benches/results/2026-11-27-h100.md`).
const FP8_OVER_BF16: f64 = 1.7;

/// The name of a copy among spans.
pub(crate) const COPY: &str = "copy";

/// The name of an exchange with other ranks among spans.
pub(crate) const EXCHANGE: &str = "exchange";

struct Times {
    rates: Rates,
    measured: Measured,
    queues: [Seconds; Queue::ALL.len()],
    /// The end times of the latest events, in order.
    events: VecDeque<Seconds>,
    /// The number of older events, which are long over.
    forgotten: u64,
    /// What queues were busy with, if somebody asked for it.
    spans: Option<Vec<Span>>,
    /// Keeps time with other ranks.
    clock: Option<Clock>,
}

/// The name of work, and what it moves if it is an operation whose time was computed.
type Work = (&'static str, Option<Moved>);

impl Times {
    /// Adds work other than a copy to a queue.
    fn work(&mut self, queue: Queue, (name, moved): Work, place: Place, seconds: f64) {
        let times = &mut self.queues[queue as usize];
        let start_s = times.with_copies;
        times.with_copies += seconds;
        times.without_copies += seconds;
        self.note(queue, (name, moved), place, start_s);
    }

    /// Adds a span that ends now.
    fn note(&mut self, queue: Queue, (name, moved): Work, place: Place, start_s: f64) {
        let end_s = self.queues[queue as usize].with_copies;
        if let Some(spans) = self.spans.as_mut().filter(|_| end_s > start_s) {
            spans.push(Span {
                queue,
                name,
                moved,
                place,
                start_s,
                end_s,
            });
        }
    }

    fn seconds(&self, operation: &Operation, cost: Cost) -> f64 {
        let measured = || {
            let key = (operation.name().to_string(), operation.sizes());
            self.measured.get(&key).copied()
        };
        let known = (!self.measured.is_empty()).then(measured).flatten();
        let Cost { flops, bytes } = cost;
        let rates = &self.rates;
        let rate = match operation {
            // Its cost counts half of its operations.
            Operation::ScaledMatmul(_) => rates.flops * FP8_OVER_BF16 / 2.0,
            Operation::GroupedMatmul(_) | Operation::GroupedGradient(_) => rates.grouped_flops,
            Operation::FlashAttention(_) => rates.attention_flops[0],
            Operation::FlashAttentionBackward(_) => rates.attention_flops[1],
            Operation::GatedDelta(_)
            | Operation::GatedDeltaBackward(_)
            | Operation::CachedDelta(_) => rates.delta_flops,
            _ => rates.flops,
        };
        let least = (flops as f64 / rate).max(bytes as f64 / rates.memory);
        known.unwrap_or(least)
    }
}

impl Timeline {
    /// A timeline without any work.
    pub fn new(rates: Rates) -> Timeline {
        Timeline::with_measured(rates, Measured::new())
    }

    /// A timeline on which some operations take their measured time.
    pub fn with_measured(rates: Rates, measured: Measured) -> Timeline {
        Timeline(Rc::new(RefCell::new(Times {
            rates,
            measured,
            queues: Default::default(),
            // The first event stands for everything before.
            events: [Seconds::default()].into(),
            forgotten: 0,
            spans: None,
            clock: None,
        })))
    }

    /// The same timeline, which keeps time with other ranks.
    pub fn beside(self, clock: Clock) -> Timeline {
        self.0.borrow_mut().clock = Some(clock);
        self
    }

    /// Drops the spans so far, and keeps those from now on.
    pub fn keep_spans(&self) {
        self.0.borrow_mut().spans = Some(Vec::new());
    }

    /// The spans since [`Timeline::keep_spans`], in the order in which their work was enqueued.
    pub fn take_spans(&self) -> Vec<Span> {
        self.0.borrow_mut().spans.take().unwrap_or_default()
    }

    /// When the computation finishes the work enqueued so far.
    pub fn computed(&self) -> Seconds {
        self.0.borrow().queues[Queue::Compute as usize]
    }

    /// Adds an operation.
    pub(crate) fn execute(&self, queue: Queue, operation: &Operation, place: Place) {
        let mut times = self.0.borrow_mut();
        let cost = operation.cost();
        let moved = Moved {
            group: operation.group(),
            bytes: cost.bytes,
        };
        let seconds = times.seconds(operation, cost);
        times.work(queue, (operation.name(), Some(moved)), place, seconds);
    }

    /// Adds work with a measured time.
    pub(crate) fn took(&self, queue: Queue, name: &'static str, place: Place, seconds: f64) {
        let mut times = self.0.borrow_mut();
        times.work(queue, (name, None), place, seconds);
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
        times.note(queue, (COPY, None), place, start_s);
    }

    /// Adds an exchange, of which both ways are busy at once.
    pub(crate) fn exchange(&self, bytes: ExchangeBytes, place: Place) {
        let mut times = self.0.borrow_mut();
        let rates = times.rates;
        // Groups of other sizes lie across machines.
        let is_near = |ranks| rates.near_ranks.is_multiple_of(ranks);
        let is_near = bytes.neighbours.is_some_and(is_near);
        let link = match is_near {
            true => rates.near_link,
            false => rates.link,
        };
        let seconds = bytes.sent.max(bytes.received) as f64 / link;
        let done = &mut times.queues[Queue::Collective as usize].with_copies;
        let start_s = *done;
        *done += seconds;
        times.note(Queue::Collective, (EXCHANGE, None), place, start_s);
    }

    /// Whether other ranks keep time with this one.
    pub(crate) fn is_beside_others(&self) -> bool {
        self.0.borrow().clock.is_some()
    }

    /// Adds an exchange of tensors that go to some ranks and come from others, which begins when those that keep time with this one
    /// are ready.
    pub(crate) fn meet(&self, sends: &[usize], receives: &[usize]) {
        let mut times = self.0.borrow_mut();
        let ready = times.queues[Queue::Collective as usize];
        if let Some(clock) = &times.clock {
            let all_ready = clock.meet(sends, receives, ready);
            times.queues[Queue::Collective as usize] = all_ready;
        }
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
        grouped_flops: 10.0,
        attention_flops: [10.0; 2],
        delta_flops: 10.0,
        memory: 8.0,
        upload: 4.0,
        download: 2.0,
        both_ways: 4.0,
        disk: 2.0,
        link: 5.0,
        near_link: 50.0,
        near_ranks: 8,
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
