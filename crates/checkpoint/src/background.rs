//! Runs work beside training.

use std::panic::resume_unwind;
use std::thread::{Builder, JoinHandle};

/// Runs one job at a time on its own thread, and keeps the outcome until it is taken.
///
/// Dropping it waits for the job, so that a process that ends does not interrupt a save. If a job panics, taking its
/// outcome panics.
#[derive(Debug)]
pub struct BackgroundWriter<T> {
    job: Option<JoinHandle<T>>,
    /// The outcome of the last finished job, if the next one could not be started.
    outcome: Option<T>,
}

impl<T> Default for BackgroundWriter<T> {
    fn default() -> Self {
        Self {
            job: None,
            outcome: None,
        }
    }
}

impl<T: Send + 'static> BackgroundWriter<T> {
    /// A writer without a job.
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts a job, after waiting for the previous one. Returns an outcome that was not taken.
    ///
    /// # Errors
    /// If the system has no thread. The job was not started, and an outcome that was not taken can still be taken.
    pub fn start(
        &mut self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> std::io::Result<Option<T>> {
        self.start_on(Builder::new().name("checkpoint".into()), job)
    }

    fn start_on(
        &mut self,
        thread: Builder,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> std::io::Result<Option<T>> {
        self.outcome = self.wait();
        self.job = Some(thread.spawn(job)?);
        Ok(self.outcome.take())
    }

    /// Whether a job is running.
    pub fn is_busy(&self) -> bool {
        self.job.as_ref().is_some_and(|job| !job.is_finished())
    }

    /// The outcome of a finished job, once. Never waits.
    pub fn take_outcome(&mut self) -> Option<T> {
        if self.is_busy() { None } else { self.wait() }
    }

    /// Waits for the job, if there is one, and returns its outcome.
    pub fn wait(&mut self) -> Option<T> {
        let Some(job) = self.job.take() else {
            return self.outcome.take();
        };
        Some(job.join().unwrap_or_else(|panic| resume_unwind(panic)))
    }
}

impl<T> Drop for BackgroundWriter<T> {
    fn drop(&mut self) {
        if let Some(job) = self.job.take() {
            // The panic was printed by its own thread, and this one may already be unwinding.
            let _ = job.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_outlives_a_job_that_no_thread_can_be_had_for() {
        let without_room = || Builder::new().stack_size(usize::MAX / 4);
        let mut writer = BackgroundWriter::new();
        writer.start(|| 1).unwrap();
        for _ in 0..2 {
            writer.start_on(without_room(), || 2).unwrap_err();
        }
        assert!(!writer.is_busy());
        assert_eq!((writer.take_outcome(), writer.wait()), (Some(1), None));
        writer.start(|| 3).unwrap();
        writer.start_on(without_room(), || 4).unwrap_err();
        assert_eq!(writer.start(|| 5).unwrap(), Some(3));
    }
}
