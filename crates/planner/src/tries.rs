//! Remembers the memory and the time of runs that were tried, so that a search plans and times none of them twice.

use crate::figures::{Figures, quick_figures};
use crate::levers::Setup;
use crate::on_paper::PaperSeconds;
use rayon::prelude::*;
use session::SessionError;
use settings::Config;

/// The memory that a run needs.
#[derive(Clone, Copy)]
pub(crate) struct Needs {
    /// The most live device bytes, also between steps.
    pub(crate) peak_bytes: u64,
    /// Slab and everything that lives across steps.
    pub(crate) reserved_bytes: u64,
    /// Pinned host memory.
    pub(crate) host_pinned_bytes: u64,
}

impl Needs {
    pub(crate) fn of(planned: &Figures) -> Needs {
        Needs {
            peak_bytes: planned.most_bytes(),
            reserved_bytes: planned.reserved_bytes,
            host_pinned_bytes: planned.host_pinned_bytes,
        }
    }
}

/// The runs that were tried for one device.
#[derive(Default)]
pub(crate) struct Tries {
    needs: Vec<(Config, Needs)>,
    seconds: Vec<(Config, f64)>,
}

impl Tries {
    /// The memory that a run needs, by [`quick_figures`].
    ///
    /// # Errors
    /// As [`crate::Plan::new`].
    pub(crate) fn needs(&mut self, run: &Setup) -> Result<Needs, SessionError> {
        if let Some(known) = find(&self.needs, run) {
            return Ok(known);
        }
        let needs = Needs::of(&quick_figures(&run.settings, run.target)?);
        self.needs.push((run.config.clone(), needs));
        Ok(needs)
    }

    /// The seconds of a step on paper.
    ///
    /// # Errors
    /// As [`crate::Plan::new`].
    pub(crate) fn seconds(&mut self, run: &Setup) -> Result<f64, SessionError> {
        if let Some(known) = find(&self.seconds, run) {
            return Ok(known);
        }
        let seconds = PaperSeconds::new(&run.settings, run.target)?.step;
        self.seconds.push((run.config.clone(), seconds));
        Ok(seconds)
    }

    /// Times runs in parallel that were not timed yet.
    ///
    /// # Errors
    /// As [`crate::Plan::new`].
    pub(crate) fn time_all(&mut self, runs: &[Setup]) -> Result<(), SessionError> {
        let timed = runs.par_iter().with_max_len(1);
        let timed = timed.filter(|run| find(&self.seconds, run).is_none());
        let timed = timed.map(|run| {
            let seconds = PaperSeconds::new(&run.settings, run.target)?.step;
            Ok((run.config.clone(), seconds))
        });
        let timed = timed.collect::<Result<Vec<_>, SessionError>>()?;
        self.seconds.extend(timed);
        Ok(())
    }
}

/// The configuration says all of a run: it has the rank too, and with it the stage of a pipeline. A climb has one target.
fn find<T: Copy>(known: &[(Config, T)], run: &Setup) -> Option<T> {
    let found = known.iter().find(|(config, _)| *config == run.config);
    found.map(|(_, value)| *value)
}
