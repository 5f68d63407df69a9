//! The thread that a trainer lives on: it is used on one thread alone, and Python calls from any.

use crate::errors::{raised, usage};
use crate::views::Views;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;
use trainer::program::STACK_BYTES;
use trainer::{Failure, Trainer};

/// How often a waiting call looks for signals.
const LOOK: Duration = Duration::from_millis(20);

/// Something to do, and whether it is to be broken off.
struct Job {
    work: Box<dyn FnOnce(&mut Trainer) + Send>,
    stop: Arc<AtomicBool>,
}

/// A trainer on a thread of its own.
pub(crate) struct TrainerThread {
    jobs: Mutex<Option<Sender<Job>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    views: Views,
    process: u32,
}

impl TrainerThread {
    /// Starts the thread as one of `threads` that compute, and waits until `make` has made its trainer there.
    pub(crate) fn start(
        py: Python,
        threads: usize,
        views: Views,
        make: impl FnOnce() -> Result<Trainer, Failure> + Send + 'static,
    ) -> PyResult<TrainerThread> {
        let (jobs, to_do) = channel();
        let (made, is_made) = channel();
        let refused = |error: &dyn std::fmt::Display| {
            let message = format!("no threads can be started for the trainer: {error}");
            usage(py, message)
        };
        let pool = pool(threads).map_err(|error| refused(&error))?;
        let of_thread = views.clone();
        let work = move || match make() {
            Err(failure) => drop(made.send(Err(failure))),
            Ok(trainer) => {
                if made.send(Ok(())).is_ok() {
                    carry_out(trainer, to_do, &views);
                }
            }
        };
        // Within the pool, so that operations start without changing threads.
        let thread = std::thread::Builder::new()
            .name("trainer".into())
            .spawn(move || pool.install(work))
            .map_err(|error| refused(&error))?;
        let (made, signalled) = waited(py, is_made, &AtomicBool::new(false))?;
        made.map_err(|failure| raised(py, &failure))?;
        signalled?;
        Ok(TrainerThread {
            views: of_thread,
            jobs: Mutex::new(Some(jobs)),
            thread: Mutex::new(Some(thread)),
            process: std::process::id(),
        })
    }

    /// Does something with the trainer on its thread. Python goes on meanwhile with its other threads.
    pub(crate) fn call<R: Send + 'static>(
        &self,
        py: Python,
        job: impl FnOnce(&mut Trainer) -> Result<R, Failure> + Send + 'static,
    ) -> PyResult<R> {
        if !self.is_own() {
            let message = "this trainer belongs to the process that made it, and this is a fork of that one: make another here, on \
                           the CPU, or start processes with multiprocessing's \"spawn\"";
            return Err(usage(py, message.into()));
        }
        let (done, is_done) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let job = Job {
            work: Box::new(move |trainer| {
                let made = job(trainer).map_err(|failure| trainer.explain(failure));
                drop(done.send(made));
            }),
            stop: stop.clone(),
        };
        let is_sent = locked(&self.jobs)
            .as_ref()
            .is_some_and(|jobs| jobs.send(job).is_ok());
        if !is_sent {
            let message = "this trainer was closed, or its thread ended; make another";
            return Err(usage(py, message.into()));
        }
        match waited(py, is_done, &stop)? {
            (done, Ok(())) => done.map_err(|failure| raised(py, &failure)),
            (Err(_), Err(signalled)) => Err(signalled),
            // It was done when the signal came: the caller has to know, and is interrupted behind it.
            (Ok(done), Err(signalled)) if signalled.is_instance_of::<PyKeyboardInterrupt>(py) => {
                // SAFETY: the interpreter runs, and this thread has its lock.
                unsafe { pyo3::ffi::PyErr_SetInterrupt() };
                Ok(done)
            }
            (Ok(_), Err(signalled)) => Err(signalled),
        }
    }

    /// Ends the thread; its memory is given back when this returns, or, if views of it live, with the last of them.
    pub(crate) fn close(&self, py: Python) {
        py.detach(|| self.end());
    }

    fn end(&self) {
        if !self.is_own() {
            return;
        }
        locked(&self.jobs).take();
        let thread = locked(&self.thread).take();
        if let (Some(thread), true) = (thread, self.views.are_none()) {
            drop(thread.join());
        }
    }

    /// Whether this process made it.
    fn is_own(&self) -> bool {
        self.process == std::process::id()
    }
}

impl Drop for TrainerThread {
    fn drop(&mut self) {
        // Jobs never take the interpreter's lock.
        self.end();
    }
}

fn pool(threads: usize) -> Result<ThreadPool, rayon::ThreadPoolBuildError> {
    ThreadPoolBuilder::new()
        .num_threads(threads)
        .stack_size(STACK_BYTES)
        .thread_name(|number| format!("trainer {number}"))
        .build()
}

/// Does one job after the other, until nobody can send more. Then the memory is given back, or with the last view of it. A panic leaves
/// nothing that could be used, or given back.
fn carry_out(mut trainer: Trainer, to_do: Receiver<Job>, views: &Views) {
    let stop = Rc::new(RefCell::new(Arc::new(AtomicBool::new(false))));
    let of_job = stop.clone();
    trainer.stop_when(move || of_job.borrow().load(Ordering::Relaxed));
    for job in to_do {
        stop.replace(job.stop);
        if catch_unwind(AssertUnwindSafe(|| (job.work)(&mut trainer))).is_err() {
            std::mem::forget(trainer);
            return;
        }
    }
    views.wait_for_none();
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|held| held.into_inner())
}

/// Waits for an answer without the interpreter's lock. A signal whose handler raises breaks the job off; the exception comes with the answer.
fn waited<R: Send>(
    py: Python,
    answer: Receiver<R>,
    stop: &AtomicBool,
) -> PyResult<(R, PyResult<()>)> {
    // Only to be seen from the closure.
    let answer = Mutex::new(answer);
    let mut signalled = Ok(());
    loop {
        match py.detach(|| locked(&answer).recv_timeout(LOOK)) {
            Ok(answer) => return Ok((answer, signalled)),
            Err(RecvTimeoutError::Timeout) if signalled.is_ok() => {
                signalled = py.check_signals();
                stop.store(signalled.is_err(), Ordering::Relaxed);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                let message = "the trainer's thread ended; what it said before stands on stderr";
                return Err(raised(py, &Failure::Defect(message.into())));
            }
        }
    }
}
