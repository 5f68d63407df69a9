//! Messages between ranks before each step.

use super::{Job, LastWords};
use crate::failure::{Failure, Result};
use data::{DataError, StepBatch};
use serde::{Deserialize, Serialize};

/// The beginning of a step; the same kind on all ranks.
#[derive(Debug, PartialEq)]
pub(crate) enum Begun {
    /// The rows that this rank has read, with the number of targets of the others.
    Step(StepBatch),
    /// The signal that a rank received, and the rank, if there are ranks.
    Signal((i32, Option<usize>)),
}

/// A rank's message before a step.
#[derive(Serialize, Deserialize)]
struct Ready {
    signal: Option<i32>,
    /// Why the rank could not read its rows.
    failed: Option<LastWords>,
    targets: usize,
}

impl Job {
    /// Begins a step. `signal` is what this rank received, and `read` its rows, or why it could not read them.
    ///
    /// # Errors
    /// On all ranks, why the first failing rank could not read its rows; [`Failure::Ranks`] if ranks are lost.
    pub(crate) fn begin_step(
        &self,
        signal: Option<i32>,
        read: Result<StepBatch, DataError>,
    ) -> Result<Begun> {
        let read = read.map_err(Failure::from);
        let Some(rank) = &self.rank else {
            return match signal {
                Some(signal) => Ok(Begun::Signal((signal, None))),
                None => read.map(Begun::Step),
            };
        };
        let all = rank.share(&Ready {
            signal,
            failed: read.as_ref().err().map(|failure| rank.words(failure)),
            targets: read.as_ref().map_or(0, StepBatch::target_count),
        })?;
        let mut signals = all.iter().enumerate();
        if let Some(told) = signals.find_map(|(by, ready)| Some((ready.signal?, Some(by)))) {
            self.is_over.set(true);
            return Ok(Begun::Signal(told));
        }
        if let Some(first) = all.iter().find_map(|ready| ready.failed.clone()) {
            self.is_over.set(true);
            return Err(read.err().unwrap_or_else(|| first.into()));
        }
        let mut step = read?;
        // Every stage of a pipeline reads the same rows.
        let targets = all.iter().map(|ready| ready.targets).sum::<usize>() / rank.parallel.pipeline;
        step.targets_elsewhere = targets - step.target_count();
        Ok(Begun::Step(step))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{on_ranks, on_ranks_of, rank};
    use super::*;
    use data::MicroBatch;

    /// A step with `targets` targets.
    fn step(targets: usize) -> StepBatch {
        StepBatch::from_iter([MicroBatch {
            input_ids: vec![0; targets],
            targets: vec![0; targets],
            rows: 1,
            seq: targets,
            part: memory::Rank::ALONE,
            documents: None,
            lengths: None,
            beside: None,
        }])
    }

    /// Stages of a pipeline read the same rows, which count once.
    #[test]
    fn targets_of_stages_count_once() {
        let parallel = settings::ParallelConfig {
            pipeline: 2,
            ..settings::ParallelConfig::default()
        };
        let elsewhere = on_ranks_of(4, &parallel, |job| {
            // Two ranks a stage.
            match job
                .begin_step(None, Ok(step([3, 5, 3, 5][rank(job)])))
                .unwrap()
            {
                Begun::Step(step) => step.targets_elsewhere,
                begun => panic!("{begun:?}"),
            }
        });
        assert_eq!(elsewhere, [5, 3, 5, 3]);
    }

    #[test]
    fn a_signal_to_one_is_a_signal_to_all() {
        let told = on_ranks(3, |job| {
            let begun = job.begin_step((rank(job) == 2).then_some(15), Ok(step(1)));
            begun.unwrap()
        });
        assert!(
            told.iter()
                .all(|told| *told == Begun::Signal((15, Some(2))))
        );
        let alone = Job::of(None, settings::ParallelConfig::default());
        assert_eq!(
            alone.begin_step(Some(2), Ok(step(1))).unwrap(),
            Begun::Signal((2, None))
        );
        assert!(alone.leads() && !alone.has_ranks());
    }

    #[test]
    fn targets_of_all_are_known_to_all() {
        let counts = on_ranks(3, |job| {
            match job
                .begin_step(None, Ok(step([2, 0, 5][rank(job)])))
                .unwrap()
            {
                Begun::Step(step) => (step.targets_elsewhere, step.target_count()),
                told => panic!("{told:?}"),
            }
        });
        assert_eq!(counts, [(5, 7), (7, 7), (2, 7)]);
    }

    #[test]
    fn what_one_cannot_read_ends_all_with_its_sentence() {
        let failures = on_ranks(2, |job| {
            let read = match rank(job) {
                1 => Err(DataError::Zero { key: "batch.micro" }),
                _ => Ok(step(1)),
            };
            let failure = job.begin_step(None, read).unwrap_err();
            assert!(job.all_know(&failure));
            (failure.exit_code(), failure.to_string())
        });
        let (code, sentence) = &failures[1];
        assert_eq!(failures[0].0, *code);
        assert!(failures[0].1.starts_with("rank 1 (") && failures[0].1.ends_with(sentence));
    }
}
