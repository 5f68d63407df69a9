//! Ends a failed command: reports the failure, and leaves the job with an exit code.

use super::Job;
use crate::failure::Failure;
use crate::log;
use settings::ConfigError;
use std::rc::Rc;

/// A command that failed, and the job that it has to leave.
pub struct FailedCommand {
    failure: Failure,
    job: Option<Rc<Job>>,
}

impl From<Failure> for FailedCommand {
    fn from(failure: Failure) -> FailedCommand {
        FailedCommand { failure, job: None }
    }
}

impl From<ConfigError> for FailedCommand {
    fn from(error: ConfigError) -> FailedCommand {
        Failure::from(error).into()
    }
}

impl FailedCommand {
    pub(crate) fn of(failure: Failure, job: Rc<Job>) -> FailedCommand {
        let job = Some(job);
        FailedCommand { failure, job }
    }

    /// The failure.
    pub fn failure(&self) -> &Failure {
        &self.failure
    }

    /// Reports the failure and leaves the job. If the other ranks know of the failure, all leave together; otherwise
    /// this rank ends the others, because they would wait. The first rank alone reports a failure that all know. Returns the exit code.
    pub fn tell_and_leave(self) -> u8 {
        let code = self.failure.exit_code();
        let others_do =
            self.failure.is_of_all() && self.job.as_ref().is_some_and(|job| !job.leads());
        log::tell(&in_words(&self.failure), others_do);
        if let Some(job) = self.job {
            job.leave(&self.failure);
        }
        code
    }
}

/// The error and its hints.
fn in_words(failure: &Failure) -> String {
    let hints = failure.hints();
    let hints = hints.iter().map(|hint| format!("hint: {hint}\n"));
    format!("error: {failure}\n{}", hints.collect::<String>())
}

impl Job {
    /// Leaves after a failure. Does not return if other ranks do not know of it.
    fn leave(&self, failure: &Failure) {
        let Some(rank) = &self.rank else {
            return;
        };
        // A launcher ends all ranks once one has left with an exit code, so all must first be done writing.
        let is_together =
            (self.is_over.get() || failure.is_of_all()) && rank.group.share(&[]).is_ok();
        match is_together {
            true => rank.group.leave(),
            false => rank.group.abort(i32::from(failure.exit_code())),
        }
    }

    /// Leaves after success.
    pub(crate) fn finish(&self) {
        if let Some(rank) = &self.rank {
            rank.group.leave();
        }
    }
}
