//! Work beside training.

use std::panic::resume_unwind;
use std::thread::{Builder, JoinHandle};

/// Does one job at a time on a thread of its own, and keeps its outcome until it is asked for.
///
/// Dropping it waits for its job, so that a process that ends does not cut a save short. A job that panics panics where its
/// outcome is taken.
#[derive(Debug)]
pub struct BackgroundWriter<T> {
    job: Option<JoinHandle<T>>,
}

impl<T> Default for BackgroundWriter<T> {
    fn default() -> Self {
        Self { job: None }
    }
}

impl<T: Send + 'static> BackgroundWriter<T> {
    /// One that has nothing to do.
    pub fn new() -> Self {
        Self::default()
    }

    /// Begins a job. If one is under way it waits for that; an outcome that was not taken is returned.
    ///
    /// # Errors
    /// If the system gives no thread: the job was not begun.
    pub fn start(
        &mut self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> std::io::Result<Option<T>> {
        let before = self.wait();
        self.job = Some(Builder::new().name("checkpoint".into()).spawn(job)?);
        Ok(before)
    }

    /// Whether a job is under way.
    pub fn is_busy(&self) -> bool {
        self.job.as_ref().is_some_and(|job| !job.is_finished())
    }

    /// The outcome of a job that is done, once. Never waits.
    pub fn take_outcome(&mut self) -> Option<T> {
        if self.is_busy() { None } else { self.wait() }
    }

    /// Waits for the job, if there is one, and returns its outcome.
    pub fn wait(&mut self) -> Option<T> {
        let outcome = self.job.take()?.join();
        Some(outcome.unwrap_or_else(|panic| resume_unwind(panic)))
    }
}

impl<T> Drop for BackgroundWriter<T> {
    fn drop(&mut self) {
        if let Some(job) = self.job.take() {
            // A panic has been printed by its own thread, and this one may be unwinding already.
            let _ = job.join();
        }
    }
}
