//! A device that waits for every operation and measures its time: on a GPU by its own clock, elsewhere by the host's.

use crate::backend;
use crate::timeline::{COPY, EXCHANGE, Measured, Rates, Timeline};
use crate::{Backend, Cost, Event, Kernels, Queue, Queues, Reading, Request, Result, Target};
use memory::{In, Memory, Out};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

/// Kernels that time their operations one after the other.
pub struct Timed<B> {
    backend: B,
    timings: Timings,
    beside: Option<Beside>,
}

/// A timeline on which queues run side by side, as they would without a wait for every operation.
struct Beside {
    timeline: Timeline,
    /// The memory that knows where the step is.
    memory: Memory,
    /// The timeline's events, by the device's.
    events: RefCell<HashMap<(Queue, u64), Event>>,
}

/// Number of events that are remembered. All others count as long over.
const EVENTS_MAX: usize = 1 << 20;

/// The measurements so far, in order. Clones share one list.
#[derive(Clone, Default)]
pub struct Timings(Rc<RefCell<Vec<Timing>>>);

/// A measured operation.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Its name.
    pub operation: &'static str,
    /// The sizes that distinguish it from other calls of its name: [`crate::Operation::sizes`].
    pub sizes: Vec<usize>,
    /// Its least cost.
    pub cost: Cost,
    /// The time that it took.
    pub time: Duration,
}

impl Timings {
    /// Returns the measurements since the last call, and removes them.
    pub fn take(&self) -> Vec<Timing> {
        self.0.take()
    }
}

impl<B: Backend> Timed<B> {
    /// Times a device's operations.
    pub fn new(kernels: Kernels<B>, timings: &Timings) -> Kernels<Timed<B>> {
        Kernels::new(Timed {
            backend: kernels.backend,
            timings: timings.clone(),
            beside: None,
        })
    }

    /// Does something in a queue, with nothing else in it.
    fn time(
        &self,
        queue: Queue,
        name: &'static str,
        work: impl FnOnce(&B) -> Result,
    ) -> Result<Duration> {
        let mut work = Some(work);
        let mut once = || work.take().map_or(Ok(()), |work| work(&self.backend));
        let time = backend::time(&self.backend, queue, &mut once)?;
        if let Some(Beside {
            timeline, memory, ..
        }) = &self.beside
        {
            timeline.took(queue, name, memory.place(), time.as_secs_f64());
        }
        Ok(time)
    }
}

impl<B: Backend> Kernels<Timed<B>> {
    /// Puts the measured times onto a timeline too, copies included. `memory` is the memory that operands are leased
    /// from.
    pub fn beside(self, timeline: &Timeline, memory: &Memory) -> Kernels<Timed<B>> {
        Kernels::new(Timed {
            beside: Some(Beside {
                timeline: timeline.clone(),
                memory: memory.clone(),
                events: RefCell::default(),
            }),
            ..self.backend
        })
    }
}

/// A timeline for measured times: it computes no time from rates.
pub fn timeline() -> Timeline {
    let never_used = f64::INFINITY;
    let rates = Rates {
        flops: never_used,
        grouped_flops: never_used,
        attention_flops: [never_used; 2],
        delta_flops: never_used,
        memory: never_used,
        upload: never_used,
        download: never_used,
        both_ways: never_used,
        disk: never_used,
        link: never_used,
        near_link: never_used,
        near_ranks: 0,
    };
    Timeline::with_measured(rates, Measured::new())
}

impl<B: Backend> Backend for Timed<B> {
    fn target(&self) -> Target {
        self.backend.target()
    }

    fn runs_ahead(&self) -> bool {
        self.backend.runs_ahead()
    }

    fn widens(&self) -> bool {
        self.backend.widens()
    }

    unsafe fn ask(&self, queue: Queue, request: Request) -> Result {
        let (name, operation) = match &request {
            Request::Operation(of) => (of.name(), Some((of.sizes(), of.cost()))),
            Request::Copy(..) | Request::Disk(_) => (COPY, None),
            Request::Exchange(_) => (EXCHANGE, None),
        };
        // SAFETY: the caller's promise.
        let time = self.time(queue, name, |backend| unsafe {
            backend.ask(queue, request)
        })?;
        if let Some((sizes, cost)) = operation {
            self.timings.0.borrow_mut().push(Timing {
                operation: name,
                sizes,
                cost,
                time,
            });
        }
        Ok(())
    }

    unsafe fn write(&self, out: Out, bytes: &[u8]) -> Result {
        // SAFETY: the caller's promise.
        unsafe { self.backend.write(out, bytes) }
    }

    unsafe fn read(&self, bytes: &mut [u8], x: In) -> Result {
        // SAFETY: the caller's promise.
        unsafe { self.backend.read(bytes, x) }
    }

    unsafe fn start_reading(&self, x: In) -> Result<Reading> {
        // SAFETY: the caller's promise.
        unsafe { self.backend.start_reading(x) }
    }
}

impl<B: Backend> Queues for Timed<B> {
    fn rank(&self) -> usize {
        self.backend.rank()
    }

    fn record(&self, queue: Queue) -> Result<Event> {
        let event = self.backend.record(queue)?;
        if let Some(beside) = &self.beside {
            let on_timeline = beside.timeline.record(queue);
            let mut events = beside.events.borrow_mut();
            if events.len() == EVENTS_MAX {
                events.clear();
            }
            events.insert((queue, event.position), on_timeline);
        }
        Ok(event)
    }

    fn wait(&self, queue: Queue, event: Event, reason: &'static str) -> Result {
        if let Some(beside) = &self.beside {
            let known = beside.events.borrow();
            let on_timeline = known.get(&(event.queue, event.position));
            let on_timeline = on_timeline.copied().unwrap_or(Event::PAST);
            beside.timeline.wait(queue, on_timeline);
        }
        self.backend.wait(queue, event, reason)
    }

    fn finish(&self, event: Event) -> Result {
        self.backend.finish(event)
    }

    fn is_over(&self, event: Event) -> bool {
        self.backend.is_over(event)
    }
}
