//! Queues that are threads of the host. Each has one worker, started at its first request.

use crate::exchange::{group_failed, without_group};
use crate::{DiskCopy, Event, Exchange, KernelError, Queue, Result};
use collectives::{Group, Incoming, Outgoing};
use memory::{In, Out};
use std::cell::RefCell;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;

/// Waits for a point of a queue without a worker. Fails if earlier work failed, since then the point is never reached.
#[cfg(feature = "cuda")]
pub(crate) type WaitForPoint = Box<dyn FnOnce() -> Result + Send>;

/// Called after each task of a queue, with the number of tasks done so far.
pub(crate) type Notify = Box<dyn Fn(Queue, u64) + Send + Sync>;

/// The queues that have workers.
///
/// After a failed file or exchange, workers skip the remaining tasks, except copies and waits, so that no caller waits
/// for ever. Every method that can fail returns that error from then on, but only once all workers are done. So a
/// caller that gets the error may give back the memory of copies.
pub(crate) struct Workers {
    progress: Arc<Progress>,
    workers: [RefCell<Option<Worker>>; Queue::ALL.len()],
}

struct Progress {
    /// The number of tasks done in each queue.
    done: Mutex<[u64; Queue::ALL.len()]>,
    changed: Condvar,
    failed: OnceLock<KernelError>,
    notify: Notify,
    /// The group for exchanges.
    group: Option<Arc<dyn Group>>,
}

/// A thread that does its tasks in order.
struct Worker {
    tasks: Option<SyncSender<Task>>,
    asked: u64,
    thread: Option<JoinHandle<()>>,
}

/// Tasks that may wait in a queue before a caller has to wait too. Memory for them is allocated once.
const TASKS_MAX: usize = 256;

enum Task {
    Copy(Out<'static>, In<'static>),
    Disk(DiskCopy<'static>),
    Exchange(Vec<Outgoing>, Vec<Incoming>),
    Wait(Event),
    #[cfg(feature = "cuda")]
    WaitForPoint(WaitForPoint),
}

impl Progress {
    fn is_over(&self, event: Event) -> bool {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        done[event.queue as usize] >= event.position
    }

    fn wait_for(&self, event: Event) {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        let is_early =
            |done: &mut [u64; Queue::ALL.len()]| done[event.queue as usize] < event.position;
        let waited = self.changed.wait_while(done, is_early);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn advance(&self, queue: Queue) {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        done[queue as usize] += 1;
        (self.notify)(queue, done[queue as usize]);
        self.changed.notify_all();
    }

    /// # Safety
    /// As for [`Group::exchange`].
    unsafe fn exchange(&self, sends: &[Outgoing], receives: &[Incoming]) -> Result {
        let group = self.group.as_ref().ok_or_else(without_group)?;
        // SAFETY: the caller's promise.
        unsafe { group.exchange(sends, receives) }.map_err(group_failed)
    }

    fn note(&self, result: Result) {
        if let Err(error) = result {
            // The first failure is kept, because others may follow from it.
            let _ = self.failed.set(error);
        }
    }
}

impl Worker {
    fn start(queue: Queue, progress: &Arc<Progress>) -> Worker {
        let (tasks, received) = sync_channel(TASKS_MAX);
        let progress = progress.clone();
        let thread = std::thread::spawn(move || work(queue, &received, &progress));
        Worker {
            tasks: Some(tasks),
            asked: 0,
            thread: Some(thread),
        }
    }

    fn ask(&mut self, task: Task) {
        let tasks = self
            .tasks
            .as_ref()
            .expect("the sender is dropped with the worker");
        tasks.send(task).expect("the thread ends after its sender");
        self.asked += 1;
    }
}

fn work(queue: Queue, tasks: &Receiver<Task>, progress: &Progress) {
    for task in tasks {
        match task {
            // SAFETY: whoever asked for the copy keeps both sides alive and alone until it is done; the sizes were
            // compared before.
            Task::Copy(out, x) => unsafe {
                std::ptr::copy_nonoverlapping(x.pointer(), out.pointer(), x.bytes());
            },
            Task::Disk(_) if progress.failed.get().is_some() => {}
            // SAFETY: as above.
            Task::Disk(copy) => progress.note(unsafe { copy.carry_out() }),
            Task::Exchange(..) if progress.failed.get().is_some() => {}
            Task::Exchange(sends, receives) => {
                // SAFETY: as above.
                progress.note(unsafe { progress.exchange(&sends, &receives) });
            }
            Task::Wait(event) => progress.wait_for(event),
            #[cfg(feature = "cuda")]
            Task::WaitForPoint(wait) => progress.note(wait()),
        }
        progress.advance(queue);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.tasks = None;
        let ended = self.thread.take().map(JoinHandle::join);
        debug_assert!(
            ended.is_none_or(|ended| ended.is_ok()),
            "a copy never panics"
        );
    }
}

impl Workers {
    pub(crate) fn new(notify: Notify, group: Option<Arc<dyn Group>>) -> Workers {
        Workers {
            progress: Arc::new(Progress {
                done: Mutex::default(),
                changed: Condvar::new(),
                failed: OnceLock::new(),
                notify,
                group,
            }),
            workers: Default::default(),
        }
    }

    /// The rank of the group that exchanges go through; 0 without one.
    pub(crate) fn rank(&self) -> usize {
        self.progress.group.as_ref().map_or(0, |group| group.rank())
    }

    fn ask(&self, queue: Queue, task: Task) -> Result {
        self.check()?;
        let mut worker = self.workers[queue as usize].borrow_mut();
        worker
            .get_or_insert_with(|| Worker::start(queue, &self.progress))
            .ask(task);
        Ok(())
    }

    /// If a file or an exchange has failed, waits for all workers and returns the error.
    pub(crate) fn check(&self) -> Result {
        let Some(error) = self.progress.failed.get() else {
            return Ok(());
        };
        for queue in Queue::ALL {
            self.synchronize(queue);
        }
        Err(error.clone())
    }

    /// Waits for all requests to the worker of a queue, whether they failed or not.
    pub(crate) fn synchronize(&self, queue: Queue) {
        self.progress.wait_for(self.end_of(queue));
    }

    /// # Safety
    /// As for [`crate::Kernels::start_upload`]; both sides are contiguous and have as many bytes.
    pub(crate) unsafe fn copy(&self, queue: Queue, out: Out, x: In) -> Result {
        // SAFETY: the caller keeps both alive until the copy is done.
        let (out, x) = unsafe { (out.outliving(), x.outliving()) };
        self.ask(queue, Task::Copy(out, x))
    }

    /// # Safety
    /// As for [`crate::Backend::ask`].
    pub(crate) unsafe fn disk(&self, copy: DiskCopy) -> Result {
        // SAFETY: the caller keeps the memory alive until the copy is done.
        let copy = unsafe { copy.outliving() };
        self.ask(copy.queue(), Task::Disk(copy))
    }

    /// # Safety
    /// As for [`crate::Backend::ask`].
    pub(crate) unsafe fn exchange(&self, exchange: Exchange) -> Result {
        let group = self.progress.group.as_ref().ok_or_else(without_group)?;
        let (sends, receives) = exchange.pieces(&**group)?;
        self.ask(Queue::Collective, Task::Exchange(sends, receives))
    }

    fn end_of(&self, queue: Queue) -> Event {
        let worker = self.workers[queue as usize].borrow();
        let position = worker.as_ref().map_or(0, |worker| worker.asked);
        Event { queue, position }
    }

    /// The present end of a queue. A queue without a worker is always over.
    pub(crate) fn record(&self, queue: Queue) -> Result<Event> {
        self.check()?;
        Ok(self.end_of(queue))
    }

    /// Whether an event of a worker is over.
    pub(crate) fn is_over(&self, event: Event) -> bool {
        self.progress.is_over(event)
    }

    /// Makes the worker of a queue wait for an event of another.
    pub(crate) fn wait(&self, queue: Queue, event: Event) -> Result {
        match self.is_over(event) {
            true => self.check(),
            false => self.ask(queue, Task::Wait(event)),
        }
    }

    /// Makes the worker of a queue wait for a point of a queue without a worker.
    #[cfg(feature = "cuda")]
    pub(crate) fn wait_for_point(&self, queue: Queue, wait: WaitForPoint) -> Result {
        self.ask(queue, Task::WaitForPoint(wait))
    }

    /// Waits in this thread until an event of a worker is over.
    pub(crate) fn finish(&self, event: Event) -> Result {
        self.progress.wait_for(event);
        self.check()
    }
}
