//! The copy queues of the CPU device: a worker thread for each direction, started by the first copy.

use crate::{Event, Queue};
use memory::{In, Out};
use std::cell::RefCell;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Uploads and downloads.
#[derive(Default)]
pub(super) struct CopyQueues {
    progress: Arc<Progress>,
    upload: RefCell<Option<Worker>>,
    download: RefCell<Option<Worker>>,
}

/// How much of each copy queue is done.
#[derive(Default)]
struct Progress {
    done: Mutex<[u64; Queue::ALL.len()]>,
    changed: Condvar,
}

/// A thread that works its tasks off in their order.
struct Worker {
    tasks: Option<SyncSender<Task>>,
    asked: u64,
    thread: Option<JoinHandle<()>>,
}

/// Tasks that may wait in a queue before whoever asks for another one waits too: memory for them is allocated once.
const TASKS_MAX: usize = 256;

/// What a copy queue does.
enum Task {
    Copy(Out<'static>, In<'static>),
    Wait(Event),
}

impl Progress {
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
        self.changed.notify_all();
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
                let bytes = x.elements() * x.dtype().size_in_bytes();
                std::ptr::copy_nonoverlapping(x.pointer(), out.pointer(), bytes);
            },
            Task::Wait(event) => progress.wait_for(event),
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

impl CopyQueues {
    fn worker(&self, queue: Queue) -> Option<&RefCell<Option<Worker>>> {
        match queue {
            Queue::Compute | Queue::Update => None,
            Queue::Upload => Some(&self.upload),
            Queue::Download => Some(&self.download),
        }
    }

    fn ask(&self, queue: Queue, task: Task) {
        let worker = self.worker(queue).expect("computation has no worker");
        let mut worker = worker.borrow_mut();
        worker
            .get_or_insert_with(|| Worker::start(queue, &self.progress))
            .ask(task);
    }

    /// # Safety
    /// As for [`crate::Queues::start_upload`]; both sides are contiguous and have as many bytes.
    pub(super) unsafe fn copy(&self, queue: Queue, out: Out, x: In) {
        // SAFETY: the caller keeps both alive until the copy is done.
        let (out, x) = unsafe { (out.outliving(), x.outliving()) };
        self.ask(queue, Task::Copy(out, x));
    }

    /// The end of a queue. Operations run at once, so theirs is over.
    pub(super) fn record(&self, queue: Queue) -> Event {
        let asked =
            |worker: &RefCell<Option<Worker>>| worker.borrow().as_ref().map(|worker| worker.asked);
        match self.worker(queue).and_then(asked) {
            Some(position) => Event { queue, position },
            None => Event::PAST,
        }
    }

    pub(super) fn wait(&self, queue: Queue, event: Event) {
        match queue {
            _ if event == Event::PAST => {}
            Queue::Compute | Queue::Update => self.progress.wait_for(event),
            Queue::Upload | Queue::Download => self.ask(queue, Task::Wait(event)),
        }
    }

    pub(super) fn finish(&self, event: Event) {
        self.progress.wait_for(event);
    }
}
