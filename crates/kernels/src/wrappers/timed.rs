//! A device that waits for every operation, and notes how long it took.

use crate::{Backend, Cost, Event, KernelError, Operation, Queue, Reading, Target, Traffic};
use memory::{In, Out};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Kernels that time their operations: one after the other, each with its launch and a wait for its end.
pub struct Timed<B> {
    backend: B,
    timings: Timings,
}

/// What was timed so far, in its order. Clones note together.
#[derive(Clone, Default)]
pub struct Timings(Rc<RefCell<Vec<Timing>>>);

/// An operation that was carried out.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Its name.
    pub operation: &'static str,
    /// What tells it from others of its name: [`Operation::sizes`].
    pub sizes: Vec<usize>,
    /// What it takes at least.
    pub cost: Cost,
    /// What it took.
    pub time: Duration,
}

impl Timings {
    /// Takes what was timed since this was asked for last.
    pub fn take(&self) -> Vec<Timing> {
        self.0.take()
    }
}

impl<B: Backend> Timed<B> {
    /// Times a device's operations.
    pub fn new(backend: B, timings: &Timings) -> Timed<B> {
        Timed {
            backend,
            timings: timings.clone(),
        }
    }
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

    fn traffic(&self) -> &Cell<Traffic> {
        self.backend.traffic()
    }

    unsafe fn execute(&self, queue: Queue, operation: Operation) -> Result<(), KernelError> {
        let (name, sizes, cost) = (operation.name(), operation.sizes(), operation.cost());
        // Whatever is under way in the queue does not count: uploads of a batch, or the wait for a copy.
        self.backend.finish(self.backend.record(queue)?)?;
        let start = Instant::now();
        // SAFETY: the caller's promise.
        unsafe { self.backend.execute(queue, operation) }?;
        self.backend.finish(self.backend.record(queue)?)?;
        self.timings.0.borrow_mut().push(Timing {
            operation: name,
            sizes,
            cost,
            time: start.elapsed(),
        });
        Ok(())
    }

    unsafe fn write(&self, out: Out, bytes: &[u8]) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.backend.write(out, bytes) }
    }

    unsafe fn read(&self, bytes: &mut [u8], x: In) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.backend.read(bytes, x) }
    }

    unsafe fn start_reading(&self, x: In) -> Result<Reading, KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.backend.start_reading(x) }
    }

    unsafe fn copy_beside(&self, queue: Queue, out: Out, x: In) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.backend.copy_beside(queue, out, x) }
    }

    fn record(&self, queue: Queue) -> Result<Event, KernelError> {
        self.backend.record(queue)
    }

    fn wait(&self, queue: Queue, event: Event, reason: &'static str) -> Result<(), KernelError> {
        self.backend.wait(queue, event, reason)
    }

    fn finish(&self, event: Event) -> Result<(), KernelError> {
        self.backend.finish(event)
    }
}
