//! How a command that failed leaves: what it says, and its exit code.

use super::Job;
use crate::failure::Failure;
use crate::log;
use settings::ConfigError;
use std::process::ExitCode;
use std::rc::Rc;

/// A command that ended early, with the job that ends with it.
pub struct Ended {
    failure: Failure,
    job: Option<Rc<Job>>,
}

impl From<Failure> for Ended {
    fn from(failure: Failure) -> Ended {
        Ended { failure, job: None }
    }
}

impl From<ConfigError> for Ended {
    fn from(error: ConfigError) -> Ended {
        Failure::from(error).into()
    }
}

impl Ended {
    pub(crate) fn of(failure: Failure, job: Rc<Job>) -> Ended {
        let job = Some(job);
        Ended { failure, job }
    }

    /// Why.
    pub fn failure(&self) -> &Failure {
        &self.failure
    }

    /// Says what was wrong, and leaves the job: together with the others where they know that it ends, else ending them, for
    /// they would wait. Nobody is told twice: what all ranks know the first one says.
    pub fn tell_and_leave(self) -> ExitCode {
        let code = self.failure.exit_code();
        let others_do =
            self.failure.is_of_all() && self.job.as_ref().is_some_and(|job| !job.leads());
        log::tell(&in_words(&self.failure), others_do);
        if let Some(job) = self.job {
            job.leave(&self.failure);
        }
        ExitCode::from(code)
    }
}

/// The error, and what may help.
fn in_words(failure: &Failure) -> String {
    let hints = failure.hints();
    let hints = hints.iter().map(|hint| format!("hint: {hint}\n"));
    format!("error: {failure}\n{}", hints.collect::<String>())
}

impl Job {
    /// Leaves after a failure. Does not return where other ranks do not know of it.
    fn leave(&self, failure: &Failure) {
        let Some(rank) = &self.rank else {
            return;
        };
        // A launcher ends the others once one has left with an exit code: so all must be done writing.
        let is_together =
            (self.is_over.get() || failure.is_of_all()) && rank.group.share(&[]).is_ok();
        match is_together {
            true => rank.group.leave(),
            false => rank.group.abort(i32::from(failure.exit_code())),
        }
    }

    /// Leaves after all is done.
    pub(crate) fn finish(&self) {
        if let Some(rank) = &self.rank {
            rank.group.leave();
        }
    }
}
