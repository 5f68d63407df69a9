//! `--trace`: records what a step did to memory and what its queues worked on, for pictures.

use crate::device::{DeviceStep, OpenDevice};
use crate::failure::{Failure, Result};
use kernels::Kernels;
use kernels::timed::{self, Timings};
use kernels::timeline::{Span, Timeline};
use memory::{History, Memory};
use report::pictures::{RefusedLease, Trace};
use settings::{Config, Resolved, Settings};
use std::path::{Path, PathBuf};

/// The folder for pictures of a command without a run directory; none if they are not asked for.
///
/// # Errors
/// [`Failure::Usage`] if pictures are asked for without a folder.
pub(crate) fn trace_folder(resolved: &Resolved) -> Result<Option<&Path>> {
    match &resolved.options.trace {
        Some(Some(folder)) => Ok(Some(folder)),
        // The configuration of a run that drew its own.
        None => Ok(None),
        Some(None) => Err(Failure::Usage(
            "this command has no run directory to draw into; name a folder: --trace DIR".into(),
        )),
    }
}

/// Draws a step on paper.
///
/// # Errors
/// If the folder cannot be written, or no session can be made from the settings.
pub(crate) fn draw_plan(folder: &Path, config: &Config) -> Result {
    let device = config.device();
    let (history, spans) = planner::trace(&Settings::new(config)?, device.target())?;
    let trace = Trace {
        // The bytes are those of a run, but the times are not.
        device: format!("{device}, on paper (times are estimates)"),
        history,
        spans,
        refused: None,
    };
    trace.write(folder).map_err(Failure::file(folder))?;
    tracing::info!("{} has pictures of a step on paper", folder.display());
    Ok(())
}

/// Records the last step of a session. Every operation is waited for, and placed on a timeline as the queues would run
/// it. So a traced run is slower, but its pictures have the device's own times.
pub(crate) struct Tracer {
    pub(crate) memory: Memory,
    timeline: Timeline,
    /// The times of operations, for a profile.
    pub(crate) timings: Timings,
    recorded: Option<(History, Vec<Span>)>,
}

impl Tracer {
    /// Records the history of a memory. Called before its first lease.
    pub(crate) fn new(memory: &Memory) -> Tracer {
        let timeline = timed::timeline();
        let clock = timeline.clone();
        memory.keep_history(move || clock.computed().with_copies);
        Tracer {
            memory: memory.clone(),
            timeline,
            timings: Timings::default(),
            recorded: None,
        }
    }

    /// The device's operations, with recording.
    ///
    /// # Errors
    /// As [`OpenDevice::kernels`].
    pub(crate) fn kernels(&self, device: &OpenDevice, step: &DeviceStep) -> Result<Box<Kernels>> {
        device.timed_kernels(step, &self.memory, &self.timings, Some(&self.timeline))
    }

    /// Forgets what was recorded of earlier steps.
    pub(crate) fn begin_step(&self) {
        self.timings.take();
        self.timeline.keep_spans();
    }

    /// Takes what was recorded. Called before leases that live across steps are released.
    pub(crate) fn stop(&mut self) {
        if self.recorded.is_none() {
            let history = self.memory.history().unwrap_or_default();
            self.recorded = Some((history, self.timeline.take_spans()));
        }
    }

    /// Writes the pictures into a folder; returns the folder.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub(crate) fn write(
        &mut self,
        device: &str,
        refused: Option<RefusedLease>,
        folder: &Path,
    ) -> Result<PathBuf> {
        self.stop();
        let (history, spans) = self.recorded.take().unwrap_or_default();
        let trace = Trace {
            device: device.into(),
            history,
            spans,
            refused,
        };
        trace.write(folder).map_err(Failure::file(folder))?;
        Ok(folder.into())
    }
}
