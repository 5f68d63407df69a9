//! Where a run writes: metrics, event files, progress.

use crate::decisions::Decided;
use crate::failure::{Failure, Result};
use crate::job::Job;
use crate::run_dir::RunDir;
use report::{
    EvalRecord, MemoryGrowth, MetricsFile, Progress, SampleRecord, StepRecord, TensorBoard,
};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Where a run writes, and what watches it.
pub(super) struct RunRecords {
    /// The run's, where this process writes them.
    metrics: Option<Metrics>,
    /// This rank's own, where there are ranks.
    own: Option<Metrics>,
    writes_events: bool,
    board: Option<TensorBoard>,
    pub(super) progress: Rc<Progress>,
    pub(super) growth: MemoryGrowth,
    /// Whether it was said that a router sends nearly all tokens to the same experts.
    pub(super) said_collapse: bool,
    /// The user was told that a file cannot be written.
    is_told: bool,
}

/// A file of metrics, and where it is.
struct Metrics {
    path: PathBuf,
    file: MetricsFile,
}

impl Metrics {
    fn open(folder: &Path, goes_on: bool) -> Result<Metrics> {
        let path = folder.join("metrics.jsonl");
        let file = match goes_on {
            true => MetricsFile::append(&path),
            false => MetricsFile::create(&path),
        };
        let file = file.map_err(Failure::file(&path))?;
        Ok(Metrics { path, file })
    }

    fn write(&mut self, record: &impl Serialize) -> Result {
        self.file.write(record).map_err(Failure::file(&self.path))
    }
}

impl RunRecords {
    /// Begins the metrics of a run, or opens those of one that goes on after `made` steps. The first rank writes the records
    /// that a run has once.
    pub(super) fn open(
        job: &Job,
        directory: &RunDir,
        decided: &Decided,
        (made, goes_on): (usize, bool),
    ) -> Result<RunRecords> {
        let (config, leads) = (&decided.config, job.leads());
        let metrics = leads.then(|| Metrics::open(directory.path(), goes_on));
        let own = directory.own().map(|own| Metrics::open(own, goes_on));
        let quiet = decided.options.quiet || !leads;
        let progress = Progress::new(config.train.steps, config.log.every, quiet);
        Ok(RunRecords {
            metrics: metrics.transpose()?,
            own: own.transpose()?,
            writes_events: config.log.tensorboard && leads,
            board: None,
            progress: Rc::new(progress.after(made).accumulating(config.batch.accum)),
            growth: MemoryGrowth::default(),
            said_collapse: false,
            is_told: false,
        })
    }

    /// Removes the records of steps after `made`: these steps are made once more.
    pub(super) fn cut(&mut self, made: usize) -> Result {
        self.files().try_for_each(|metrics| {
            let file = MetricsFile::resume(&metrics.path, made);
            metrics.file = file.map_err(Failure::file(&metrics.path))?;
            Ok(())
        })
    }

    fn files(&mut self) -> impl Iterator<Item = &mut Metrics> {
        self.metrics.iter_mut().chain(&mut self.own)
    }

    /// Begins event files, if they are asked for.
    pub(super) fn begin_events(&mut self, folder: &Path, made: usize) -> Result {
        let board = self
            .writes_events
            .then(|| TensorBoard::create(folder, made + 1));
        self.board = board.transpose().map_err(Failure::file(folder))?;
        Ok(())
    }

    /// Writes a line that the file cannot do without.
    pub(super) fn write(&mut self, record: &impl Serialize) -> Result {
        self.files().try_for_each(|metrics| metrics.write(record))
    }

    /// Writes a line that is this rank's alone.
    pub(super) fn write_own(&mut self, record: &impl Serialize) -> Result {
        self.own
            .iter_mut()
            .try_for_each(|metrics| metrics.write(record))
    }

    /// Writes a line whose failure does not end training; it is kept until there is room.
    pub(super) fn note(&mut self, record: &impl Serialize) {
        let written = self.write(record);
        self.tell(written);
    }

    /// Writes a step down, as the run has it and as this rank does: with its own targets.
    pub(super) fn step(&mut self, record: &StepRecord, own_targets: usize) {
        self.progress.step(record);
        let own = StepRecord {
            tokens: own_targets,
            ..record.clone()
        };
        let of_run = self.metrics.as_mut().map(|metrics| metrics.write(record));
        let of_rank = self.own.as_mut().map(|metrics| metrics.write(&own));
        for written in [of_run, of_rank].into_iter().flatten() {
            self.tell(written);
        }
        if let Some(board) = &mut self.board {
            let written = board.step(record).map_err(Failure::file("the event file"));
            self.tell(written);
        }
    }

    pub(super) fn evaluation(&mut self, record: &EvalRecord) {
        self.progress.evaluation(record);
        self.note(record);
        if let Some(board) = &mut self.board {
            let written = board.evaluation(record.step, record.loss, record.perplexity);
            self.tell(written.map_err(Failure::file("the event file")));
        }
    }

    pub(super) fn sample(&mut self, record: &SampleRecord) {
        self.progress.sample(record);
        self.note(record);
    }

    /// Says once that something could not be written.
    fn tell(&mut self, written: Result) {
        match written {
            Err(failure) if !self.is_told => {
                tracing::warn!(
                    "{failure}; training goes on, and it is tried again with every step"
                );
                self.is_told = true;
            }
            _ => {}
        }
    }
}
