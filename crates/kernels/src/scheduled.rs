//! A CPU device whose queues run when a seeded scheduler says, for tests of what orders them.
//!
//! On a GPU, a queue may be ahead of another by any distance that the events between them allow. [`Scheduled`] keeps
//! every operation and copy in its queue until the scheduler picks that queue, in any order that the events allow, and
//! runs it then. Whatever is not ordered by an event comes out wrong under some seed: it reads too early, or what it
//! reads has been replaced.

use crate::queue::{bytes_of, count_download, count_upload};
use crate::random::random_u32;
use crate::{
    AdamW, AttentionShape, Event, FlashOptions, Init, KernelError, Kernels, Master, Moment, Queue,
    Queues, Reading, Target, Traffic, check,
};
use memory::{In, Out};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

/// Kernels that run later, on the processor.
pub struct Scheduled<K> {
    kernels: K,
    ignored: Option<&'static str>,
    schedule: RefCell<Schedule<K>>,
    reasons: Reasons,
    traffic: Cell<Traffic>,
    /// Readings that have been computed or not, by their number.
    readings: RefCell<Vec<Box<[u8]>>>,
}

/// Why queues have waited for one another so far, and how often. Clones count together.
#[derive(Clone, Default)]
pub struct Reasons(Rc<RefCell<BTreeMap<&'static str, usize>>>);

impl Reasons {
    /// What has been counted.
    pub fn counts(&self) -> BTreeMap<&'static str, usize> {
        self.0.borrow().clone()
    }

    fn add(&self, reason: &'static str) {
        *self.0.borrow_mut().entry(reason).or_default() += 1;
    }
}

type Work<K> = Box<dyn FnOnce(&K) -> Result<(), KernelError>>;

enum Task<K> {
    Run(Work<K>),
    Wait(Event),
}

/// The queues, and who is next.
struct Schedule<K> {
    seed: u64,
    drawn: u64,
    /// How often a queue is picked: some schedules hold one far back.
    weights: [u32; Queue::ALL.len()],
    queues: [VecDeque<Task<K>>; Queue::ALL.len()],
    asked: [u64; Queue::ALL.len()],
    done: [u64; Queue::ALL.len()],
}

impl<K> Schedule<K> {
    fn new(seed: u64) -> Schedule<K> {
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

    fn ask(&mut self, queue: Queue, task: Task<K>) {
        self.queues[queue as usize].push_back(task);
        self.asked[queue as usize] += 1;
    }

    fn is_over(&self, event: Event) -> bool {
        self.done[event.queue as usize] >= event.position
    }

    /// A queue whose first task can run.
    fn pick(&mut self) -> Option<usize> {
        let can_run = |index: &usize| match self.queues[*index].front() {
            Some(Task::Run(_)) => true,
            Some(Task::Wait(event)) => self.is_over(*event),
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
    fn next(&mut self) -> Option<Task<K>> {
        let index = self.pick()?;
        let task = self.queues[index].pop_front();
        self.done[index] += 1;
        task
    }
}

impl<K: Kernels> Scheduled<K> {
    /// Kernels under a schedule. All waits for the reason `ignored` are left out, so that tests can show that each is
    /// needed.
    pub fn new(kernels: K, seed: u64, ignored: Option<&'static str>) -> Scheduled<K> {
        Scheduled {
            kernels,
            ignored,
            schedule: RefCell::new(Schedule::new(seed)),
            reasons: Reasons::default(),
            traffic: Cell::default(),
            readings: RefCell::default(),
        }
    }

    /// Why queues wait for one another, also after these kernels have been given away.
    pub fn reasons(&self) -> Reasons {
        self.reasons.clone()
    }

    /// Puts work into a queue, and runs some of what the queues hold.
    fn ask(&self, queue: Queue, work: Work<K>) -> Result<(), KernelError> {
        let tasks = {
            let mut schedule = self.schedule.borrow_mut();
            schedule.ask(queue, Task::Run(work));
            schedule.draw(3)
        };
        (0..tasks).try_for_each(|_| self.run_one().map(|_| ()))
    }

    /// Whether there was something to run.
    fn run_one(&self) -> Result<bool, KernelError> {
        let task = self.schedule.borrow_mut().next();
        match task {
            None => Ok(false),
            Some(Task::Wait(_)) => Ok(true),
            Some(Task::Run(work)) => work(&self.kernels).map(|()| true),
        }
    }

    fn run_until(&self, event: Event) -> Result<(), KernelError> {
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

/// An argument that work takes along.
trait Lasting {
    type Lasting: 'static;

    /// # Safety
    /// What is viewed stays alive, and used as the device's rules say, until the work is done.
    unsafe fn lasting(self) -> Self::Lasting;
}

macro_rules! plain {
    ($($name:ty),*) => {
        $(impl Lasting for $name {
            type Lasting = $name;
            unsafe fn lasting(self) -> $name { self }
        })*
    };
}

plain!(f32, bool, Option<f32>, AttentionShape);

macro_rules! viewing {
    ($($name:ident, $value:ident => $made:expr;)*) => {
        $(impl Lasting for $name<'_> {
            type Lasting = $name<'static>;
            unsafe fn lasting(self) -> $name<'static> {
                let $value = self;
                // SAFETY: the caller's promise.
                unsafe { $made }
            }
        })*
    };
}

viewing! {
    In, view => view.outliving();
    Out, view => view.outliving();
    Init, init => match init {
        Init::Overwrite => Init::Overwrite,
        Init::Accumulate => Init::Accumulate,
        Init::Add(x) => Init::Add(x.outliving()),
    };
    FlashOptions, options => FlashOptions {
        documents: options.documents.map(|documents| documents.outliving()),
        dropout: options.dropout,
    };
    Moment, moment => match moment {
        Moment::Plain(values) => Moment::Plain(values.outliving()),
        Moment::Quantised { codes, absmax } => Moment::Quantised {
            codes: codes.outliving(),
            absmax: absmax.outliving(),
        },
    };
    Master, master => match master {
        Master::Parameters => Master::Parameters,
        Master::F32(master) => Master::F32(master.outliving()),
        Master::Remainder(remainder) => Master::Remainder(remainder.outliving()),
    };
    AdamW, update => AdamW {
        parameters: update.parameters.outliving(),
        master: update.master.lasting(),
        first_moment: update.first_moment.lasting(),
        second_moment: update.second_moment.lasting(),
        gradients: update.gradients.outliving(),
        rates: update.rates.outliving(),
        clip: update.clip.outliving(),
        key: update.key.outliving(),
        ..update
    };
}

impl Lasting for Option<Out<'_>> {
    type Lasting = Option<Out<'static>>;

    unsafe fn lasting(self) -> Option<Out<'static>> {
        // SAFETY: the caller's promise.
        self.map(|out| unsafe { out.outliving() })
    }
}

impl<K: Kernels + 'static> Queues for Scheduled<K> {
    fn runs_ahead(&self) -> bool {
        true
    }

    unsafe fn start_upload(&self, out: Out, x: In) -> Result<(), KernelError> {
        check::start_copy("start_upload", &out, &x)?;
        count_upload(&self.traffic, bytes_of(&x));
        // SAFETY: the caller's promise.
        unsafe { self.ask(Queue::Upload, copy(out, x)) }
    }

    unsafe fn start_download(&self, out: Out, x: In) -> Result<(), KernelError> {
        check::start_copy("start_download", &out, &x)?;
        count_download(&self.traffic, bytes_of(&x));
        // SAFETY: the caller's promise.
        unsafe { self.ask(Queue::Download, copy(out, x)) }
    }

    fn start_read(&self, x: In) -> Result<Reading, KernelError> {
        check::start_read(&x)?;
        let bytes = bytes_of(&x);
        count_download(&self.traffic, bytes);
        let mut landing = vec![0u8; bytes].into_boxed_slice();
        let pointer = landing.as_mut_ptr();
        self.readings.borrow_mut().push(landing);
        // SAFETY: the landing place lives as long as `self`, and is written by this work alone.
        unsafe {
            let out = Out::of_slice(std::slice::from_raw_parts_mut(pointer, bytes), [bytes]);
            self.ask(Queue::Compute, copy(out, x.cast(memory::DType::U8)))?;
            Ok(Reading::after(self.end_of(Queue::Compute), pointer, bytes))
        }
    }

    fn record(&self, queue: Queue) -> Result<Event, KernelError> {
        Ok(self.end_of(queue))
    }

    fn wait(&self, queue: Queue, event: Event, reason: &'static str) -> Result<(), KernelError> {
        self.reasons.add(reason);
        if self.ignored != Some(reason) {
            self.schedule.borrow_mut().ask(queue, Task::Wait(event));
        }
        Ok(())
    }

    fn finish(&self, event: Event) -> Result<(), KernelError> {
        self.run_until(event)
    }

    fn traffic(&self) -> Traffic {
        self.traffic.get()
    }
}

/// # Safety
/// As for [`Queues::start_upload`].
unsafe fn copy<K>(out: Out, x: In) -> Work<K> {
    // SAFETY: the caller's promise.
    let (out, x) = unsafe { (out.outliving(), x.outliving()) };
    Box::new(move |_| {
        // SAFETY: both sides have as many bytes, and the caller keeps them alive. If a wait is missing that keeps them
        // apart from other work, what is read is wrong, which is what the test is for.
        unsafe { std::ptr::copy(x.pointer(), out.pointer(), bytes_of(&x)) };
        Ok(())
    })
}

/// Operations that wait in the queue of computation.
macro_rules! operations {
    ($($name:ident($($argument:ident: $type:ty),* $(,)?);)*) => {
        $(fn $name(&self, $($argument: $type),*) -> Result<(), KernelError> {
            // SAFETY: leases are given out in the order of the queue of computation, so what an operation is handed
            // holds for it until it runs.
            let ($($argument,)*) = unsafe { ($($argument.lasting(),)*) };
            self.ask(Queue::Compute, Box::new(move |kernels: &K| kernels.$name($($argument),*)))
        })*
    };
}

impl<K: Kernels + 'static> Kernels for Scheduled<K> {
    fn target(&self) -> Target {
        self.kernels.target()
    }

    fn upload(&self, out: Out, bytes: &[u8]) -> Result<(), KernelError> {
        count_upload(&self.traffic, bytes.len());
        let bytes = bytes.to_vec();
        // SAFETY: as for the other operations.
        let out = unsafe { out.outliving() };
        self.ask(
            Queue::Compute,
            Box::new(move |kernels: &K| kernels.upload(out, &bytes)),
        )
    }

    fn download(&self, bytes: &mut [u8], x: In) -> Result<(), KernelError> {
        count_download(&self.traffic, bytes.len());
        self.run_until(self.end_of(Queue::Compute))?;
        self.kernels.download(bytes, x)
    }

    unsafe fn start_adamw(&self, update: AdamW) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        let update = unsafe { update.lasting() };
        self.ask(
            Queue::Update,
            Box::new(move |kernels: &K| kernels.adamw(update)),
        )
    }

    operations! {
        fill(out: Out, value: f32);
        copy(out: Out, x: In);
        matmul(out: Out, a: In, b: In, init: Init);
        add_bias(out: Out, bias: In);
        bias_backward(out: Out, dy: In, init: Init);
        embedding(out: Out, table: In, ids: In);
        embedding_backward(dtable: Out, dout: In, ids: In, init: Init);
        rms_norm(y: Option<Out>, rstd: Option<Out>, x: In, weight: In, eps: f32);
        rms_norm_backward(
            dx: Out, dx_init: Init, dweight: Out, dweight_init: Init, dy: In, x: In, weight: In, rstd: In,
        );
        rotary(x: Out, table: In, inverse: bool);
        attention(
            out: Option<Out>, probs: Option<Out>, scratch: Out, q: In, k: In, v: In, shape: AttentionShape,
        );
        attention_backward(
            dq: Out, dk: Out, dv: Out, scratch: Out, dout: In, probs: In, q: In, k: In, v: In,
            shape: AttentionShape,
        );
        flash_attention(
            out: Option<Out>, lse: Option<Out>, scratch: Out, q: In, k: In, v: In, shape: AttentionShape,
            options: FlashOptions,
        );
        flash_attention_backward(
            dq: Out, dk: Out, dv: Out, scratch: Out, dout: In, out: In, lse: In, q: In, k: In, v: In,
            shape: AttentionShape, options: FlashOptions,
        );
        swiglu(act: Out, gate: In, up: In);
        swiglu_backward(gate: Out, up: Out, dact: In);
        cross_entropy(losses: Out, logits: Out, targets: In, scale: f32);
        sum(out: Out, x: In, init: Init);
        norm_and_clip(out: Out, parts: Out, x: In, loss: In, max_norm: Option<f32>);
        adamw(update: AdamW);
    }
}

impl<K> Drop for Scheduled<K> {
    fn drop(&mut self) {
        // What is left was never waited for by anybody; its memory may be gone.
        self.schedule.get_mut().queues = Default::default();
    }
}
