//! A CPU device whose queues run when a seeded scheduler says, for tests of what orders them.
//!
//! On a GPU, a queue may be ahead of another by any distance that the events between them allow. [`Scheduled`] keeps
//! every operation and copy in its queue until the scheduler picks that queue, in any order that the events allow, and
//! runs it then. Whatever is not ordered by an event comes out wrong under some seed: it reads too early, or what it
//! reads has been replaced. [`Waits::unordered`] needs no unlucky seed: it names work that touches the same bytes as
//! other work while no event orders the two.

use crate::hazards::{Hazards, Touch};
use kernels::random::random_u32;
use kernels::{
    Backend, Event, Exchange, HostSide, KernelError, Kernels, Queue, Queues, Reading, Request,
    Target,
};
use memory::{DType, In, Out};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

/// Kernels that run later, on the processor. Work that is left in the queues when they are dropped
/// never runs, because its memory may be gone.
pub struct Scheduled<B> {
    backend: B,
    ignored: Option<&'static str>,
    schedule: RefCell<Schedule>,
    waits: Waits,
    hazards: RefCell<Hazards>,
    /// Why a file was not read or written, or an exchange failed, after which nothing runs any more.
    failed: RefCell<Option<KernelError>>,
    /// Readings that have been computed or not, by their number.
    readings: RefCell<Vec<Box<[u8]>>>,
}

/// How queues have waited for one another so far. Clones note together.
#[derive(Clone, Default)]
pub struct Waits {
    reasons: Rc<RefCell<BTreeMap<&'static str, usize>>>,
    unordered: Rc<RefCell<BTreeSet<String>>>,
}

impl Waits {
    /// The number of waits for each reason, those that were left out included.
    pub fn counts(&self) -> BTreeMap<&'static str, usize> {
        self.reasons.borrow().clone()
    }

    /// Work that touches the same bytes as earlier work of another queue without waiting for it. Empty if no wait is
    /// missing.
    pub fn unordered(&self) -> BTreeSet<String> {
        self.unordered.borrow().clone()
    }
}

/// What a queue holds.
enum Task {
    Request(Box<Request<'static>>),
    Write(Out<'static>, Vec<u8>),
    Wait(Event),
}

impl Task {
    /// Its name, and the bytes that it reads and writes.
    fn touches(&self) -> (&'static str, Vec<Touch>) {
        let request = match self {
            Task::Write(out, _) => return ("upload", vec![Touch::written(out)]),
            Task::Wait(_) => return ("wait", Vec::new()),
            Task::Request(request) => request,
        };
        match &**request {
            Request::Operation(operation) => {
                let touches = operation.operands().map(|(view, is_written)| Touch {
                    is_written,
                    ..Touch::read(&view)
                });
                (operation.name(), touches.collect())
            }
            Request::Copy(out, x) => ("copy", vec![Touch::written(out), Touch::read(x)]),
            Request::Disk(copy) => {
                let (name, host) = match &copy.host {
                    HostSide::Read(out) => ("disk read", Touch::written(out)),
                    HostSide::Write(x) => ("disk write", Touch::read(x)),
                };
                let start = copy.offset as usize;
                let file = Touch {
                    space: Arc::as_ptr(&copy.file).cast::<u8>() as usize,
                    bytes: start..start + copy.bytes(),
                    is_written: !host.is_written,
                };
                (name, vec![host, file])
            }
            Request::Exchange(exchange) => {
                let sends = exchange.sends.iter().map(|(_, x)| Touch::read(x));
                let receives = exchange.receives.iter();
                let receives = receives.map(|(_, out)| Touch::written(out));
                ("exchange", sends.chain(receives).collect())
            }
        }
    }
}

/// The queues, and who is next.
struct Schedule {
    seed: u64,
    drawn: u64,
    /// How often a queue is picked: some schedules hold one far back.
    weights: [u32; Queue::ALL.len()],
    queues: [VecDeque<Task>; Queue::ALL.len()],
    asked: [u64; Queue::ALL.len()],
    done: [u64; Queue::ALL.len()],
}

impl Schedule {
    fn new(seed: u64) -> Schedule {
        let mut schedule = Schedule {
            seed,
            drawn: 0,
            weights: [1; Queue::ALL.len()],
            queues: Default::default(),
            asked: [0; Queue::ALL.len()],
            done: [0; Queue::ALL.len()],
        };
        schedule.weights =
            [(); Queue::ALL.len()].map(|()| [1, 30, 1000][schedule.draw(3) as usize]);
        schedule
    }

    /// A number below `bound`.
    fn draw(&mut self, bound: u32) -> u32 {
        self.drawn += 1;
        random_u32(self.seed, self.drawn) % bound
    }

    fn ask(&mut self, queue: Queue, task: Task) {
        self.queues[queue as usize].push_back(task);
        self.asked[queue as usize] += 1;
    }

    fn is_over(&self, event: Event) -> bool {
        self.done[event.queue as usize] >= event.position
    }

    /// A queue whose first task can run.
    fn pick(&mut self) -> Option<usize> {
        let can_run = |index: &usize| match self.queues[*index].front() {
            Some(Task::Wait(event)) => self.is_over(*event),
            Some(_) => true,
            None => false,
        };
        let candidates: Vec<usize> = (0..Queue::ALL.len()).filter(can_run).collect();
        let total: u32 = candidates.iter().map(|index| self.weights[*index]).sum();
        if candidates.is_empty() {
            return None;
        }
        let mut ticket = self.draw(total);
        candidates.into_iter().find(|index| {
            let weight = self.weights[*index];
            let is_picked = ticket < weight;
            ticket = ticket.wrapping_sub(weight);
            is_picked
        })
    }

    /// Takes a task that can run; none if there is none.
    fn next(&mut self) -> Option<Task> {
        let index = self.pick()?;
        let task = self.queues[index].pop_front();
        self.done[index] += 1;
        task
    }
}

impl<B: Backend> Scheduled<B> {
    /// Kernels under a schedule. All waits for the reason `ignored` are left out, so that tests can show that each is
    /// needed.
    pub fn new(
        kernels: Kernels<B>,
        seed: u64,
        ignored: Option<&'static str>,
    ) -> Kernels<Scheduled<B>> {
        Kernels::new(Scheduled {
            backend: kernels.into_backend(),
            ignored,
            schedule: RefCell::new(Schedule::new(seed)),
            waits: Waits::default(),
            hazards: RefCell::default(),
            failed: RefCell::default(),
            readings: RefCell::default(),
        })
    }

    /// How queues wait for one another, also after these kernels have been given away.
    pub fn waits(&self) -> Waits {
        self.waits.clone()
    }

    /// Puts a task into a queue, and runs some of what the queues hold.
    fn hold(&self, queue: Queue, task: Task) -> Result<(), KernelError> {
        self.check()?;
        let (name, touches) = task.touches();
        let hazard = self.hazards.borrow_mut().command(queue, name, &touches);
        self.waits.unordered.borrow_mut().extend(hazard);
        let tasks = {
            let mut schedule = self.schedule.borrow_mut();
            schedule.ask(queue, task);
            schedule.draw(3)
        };
        (0..tasks).try_for_each(|_| self.run_one().map(|_| ()))
    }

    /// Refuses to go on after a file or an exchange has failed.
    fn check(&self) -> Result<(), KernelError> {
        self.failed.borrow().clone().map_or(Ok(()), Err)
    }

    /// Whether there was something to run.
    fn run_one(&self) -> Result<bool, KernelError> {
        let task = self.schedule.borrow_mut().next();
        let Some(task) = task else {
            return Ok(false);
        };
        // SAFETY: what was asked for had been checked, for the target and the workspace of the backend below. Leases are
        // given out in the order of the queue of computation, so operations still have what they were handed, and
        // whoever asks for a copy keeps both sides alive. If a wait is missing that keeps them apart from other work,
        // what is read is wrong, which is what the test is for.
        unsafe {
            match task {
                Task::Write(out, bytes) => self.backend.write(out, &bytes)?,
                Task::Wait(_) => {}
                Task::Request(request) => match *request {
                    Request::Copy(out, x) => {
                        std::ptr::copy(x.pointer(), out.pointer(), x.bytes());
                    }
                    Request::Disk(copy) => self.noted(copy.carry_out())?,
                    Request::Exchange(exchange) => self.noted(self.exchange_now(exchange))?,
                    operation @ Request::Operation(_) => {
                        self.backend.ask(Queue::Compute, operation)?;
                    }
                },
            }
        }
        Ok(true)
    }

    /// Remembers a failure after which nothing runs any more.
    fn noted(&self, result: Result<(), KernelError>) -> Result<(), KernelError> {
        result.inspect_err(|error| {
            self.failed.replace(Some(error.clone()));
        })
    }

    /// Waits for the other ranks, as a queue does that has come to the exchange.
    ///
    /// # Safety
    /// As for [`Backend::ask`].
    unsafe fn exchange_now(&self, exchange: Exchange) -> Result<(), KernelError> {
        let exchange = Request::Exchange(exchange);
        // SAFETY: the caller's promise.
        unsafe { self.backend.ask(Queue::Collective, exchange) }?;
        let done = self.backend.record(Queue::Collective)?;
        self.backend.finish(done)
    }

    fn run_until(&self, event: Event) -> Result<(), KernelError> {
        self.check()?;
        self.hazards.borrow_mut().finish(event);
        while !self.schedule.borrow().is_over(event) {
            assert!(self.run_one()?, "queues wait for one another for ever");
        }
        Ok(())
    }

    fn end_of(&self, queue: Queue) -> Event {
        Event {
            queue,
            position: self.schedule.borrow().asked[queue as usize],
        }
    }
}

impl<B: Backend> Backend for Scheduled<B> {
    fn target(&self) -> Target {
        self.backend.target()
    }

    fn runs_ahead(&self) -> bool {
        true
    }

    fn widens(&self) -> bool {
        self.backend.widens()
    }

    unsafe fn ask(&self, queue: Queue, request: Request) -> Result<(), KernelError> {
        // SAFETY: leases are given out in the order of the queue of computation, so what an operation is handed holds
        // for it until it runs; in another queue its caller has promised that.
        let request = unsafe { request.outliving() };
        self.hold(queue, Task::Request(Box::new(request)))
    }

    unsafe fn write(&self, out: Out, bytes: &[u8]) -> Result<(), KernelError> {
        // SAFETY: as for operations.
        let out = unsafe { out.outliving() };
        self.hold(Queue::Compute, Task::Write(out, bytes.to_vec()))
    }

    unsafe fn read(&self, bytes: &mut [u8], x: In) -> Result<(), KernelError> {
        self.run_until(self.end_of(Queue::Compute))?;
        // SAFETY: the caller's promise.
        unsafe { self.backend.read(bytes, x) }
    }

    unsafe fn start_reading(&self, x: In) -> Result<Reading, KernelError> {
        let bytes = x.bytes();
        let mut landing = vec![0u8; bytes].into_boxed_slice();
        let pointer = landing.as_mut_ptr();
        self.readings.borrow_mut().push(landing);
        // SAFETY: the landing place lives as long as `self`, and is written by this copy alone.
        unsafe {
            let out = Out::of_slice(std::slice::from_raw_parts_mut(pointer, bytes), [bytes]);
            self.ask(Queue::Compute, Request::Copy(out, x.cast(DType::U8)))?;
            Ok(Reading::after(self.end_of(Queue::Compute), pointer, bytes))
        }
    }
}

impl<B: Backend> Queues for Scheduled<B> {
    fn rank(&self) -> usize {
        self.backend.rank()
    }

    fn record(&self, queue: Queue) -> Result<Event, KernelError> {
        self.check()?;
        Ok(self.end_of(queue))
    }

    fn wait(&self, queue: Queue, event: Event, reason: &'static str) -> Result<(), KernelError> {
        self.check()?;
        let mut reasons = self.waits.reasons.borrow_mut();
        *reasons.entry(reason).or_default() += 1;
        if self.ignored != Some(reason) {
            self.hazards.borrow_mut().wait(queue, event);
            self.schedule.borrow_mut().ask(queue, Task::Wait(event));
        }
        Ok(())
    }

    fn finish(&self, event: Event) -> Result<(), KernelError> {
        self.run_until(event)
    }

    fn is_over(&self, event: Event) -> bool {
        self.schedule.borrow().is_over(event)
    }
}
