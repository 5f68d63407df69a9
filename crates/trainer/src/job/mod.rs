//! The job that a run belongs to: ranks begin, continue and end together. A single process agrees with itself.

mod differences;
mod failed_command;
mod last_words;
mod steps;

pub use failed_command::FailedCommand;
pub(crate) use steps::Begun;

use crate::failure::{Failure, Result};
use crate::last_words::{LastWords, hostname};
use collectives::{Alone, Group, GroupError, Launch, Patience};
use memory::Layer;
use model::{Architecture, Attention};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use settings::{Config, Device, ParallelConfig, RankEngine};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use units::Zero;

/// The job of this process.
pub(crate) struct Job {
    /// None without ranks.
    rank: Option<Arc<OfJob>>,
    /// Whether all ranks know that the job ends, and why. Then no rank waits for another.
    is_over: Cell<bool>,
}

/// The last line but one of a rank's metrics: the rank, and what its engine sent.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", rename = "ranks")]
pub(crate) struct RanksRecord {
    rank: usize,
    size: usize,
    hostname: String,
    engine: String,
    /// Bytes that the engine's library was given for other ranks.
    sent_bytes: u64,
}

/// What a rank knows of itself when something ends it.
struct OfJob {
    group: Arc<dyn Group>,
    /// Where it writes its last words, once the run has a directory.
    directory: OnceLock<PathBuf>,
    /// Number of steps made.
    step: AtomicUsize,
    /// Number of its micro-batches that were asked for in the next step.
    micro_batches: AtomicUsize,
    /// The grid of ranks.
    parallel: ParallelConfig,
}

/// How many times a step, on paper or the longest so far, a rank waits for others and for its GPU, at least: rates on paper are
/// assumed, and machines slow down.
const STEPS_WAITED: f64 = 20.0;

/// No wait is longer: a year.
const LONGEST_S: f64 = 3e7;

/// How long to wait, at least, for steps that take so many seconds.
pub(crate) fn long_wait(seconds: f64) -> Duration {
    Duration::from_secs_f64((STEPS_WAITED * seconds).min(LONGEST_S))
}

/// Runs `act` on every rank, and ends the job: together, or by ending ranks that do not know of a failure.
///
/// # Errors
/// [`FailedCommand`], which must still leave the job.
pub(crate) fn together(
    job: Rc<Job>,
    act: impl FnOnce(&Rc<Job>) -> Result,
) -> Result<(), FailedCommand> {
    // The first rank may still be writing, and a launcher ends the remaining ranks when others have left.
    match act(&job).and_then(|()| job.agree(Ok(()))) {
        Ok(()) => {
            job.finish();
            Ok(())
        }
        Err(failure) => {
            let failure = job.explain(failure);
            job.leave_words(&failure);
            Err(FailedCommand::of(failure, job))
        }
    }
}

/// A rank's message when all must have succeeded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct RankOutcome {
    /// Why this rank failed, if it did.
    failed: Option<LastWords>,
}

impl Job {
    /// Joins the group that a launcher started this process in. Without a launcher, makes a group of one if the
    /// configuration asks for it. Afterwards a panic ends all ranks.
    ///
    /// # Errors
    /// [`Failure::Ranks`] if there is no engine, or if other ranks do not join.
    pub(crate) fn start(config: &Config, device: Device, launch: Option<&Launch>) -> Result<Job> {
        let group = match launch {
            Some(launch) => Some(start(config, device, launch)?),
            None => config.ranks().map(|_| Arc::new(Alone) as Arc<dyn Group>),
        };
        let job = Job::of(group, config.parallel.clone());
        if let Some(rank) = &job.rank {
            rank.outlive_panics();
        }
        Ok(job)
    }

    fn of(group: Option<Arc<dyn Group>>, parallel: ParallelConfig) -> Job {
        let rank = |group| OfJob {
            group,
            directory: OnceLock::new(),
            step: AtomicUsize::new(0),
            micro_batches: AtomicUsize::new(0),
            parallel,
        };
        Job {
            rank: group.map(rank).map(Arc::new),
            is_over: Cell::new(false),
        }
    }

    /// The engine between its ranks.
    pub(crate) fn group(&self) -> Option<Arc<dyn Group>> {
        Some(self.rank.as_ref()?.group.clone())
    }

    /// The engine's name.
    pub(crate) fn engine(&self) -> Option<String> {
        Some(self.rank.as_ref()?.group.engine())
    }

    /// This rank's number and the number of ranks; none without ranks.
    pub(crate) fn rank(&self) -> Option<memory::Rank> {
        let group = &self.rank.as_ref()?.group;
        Some(memory::Rank {
            number: group.rank(),
            of: group.size(),
        })
    }

    /// The number of ranks that train together.
    pub(crate) fn size(&self) -> usize {
        self.rank().map_or(1, |rank| rank.of)
    }

    /// Whether this rank writes what a run has only once.
    pub(crate) fn leads(&self) -> bool {
        self.rank().is_none_or(|rank| rank.number == 0)
    }

    /// Whether there are ranks. One is possible.
    pub(crate) fn has_ranks(&self) -> bool {
        self.rank.is_some()
    }

    /// Sets the folder for last words.
    pub(crate) fn leave_words_in(&self, directory: &Path) {
        if let Some(rank) = &self.rank {
            // A run has only one directory.
            let _ = rank.directory.set(directory.into());
        }
    }

    /// Records that `step` steps are made.
    pub(crate) fn note_step(&self, step: usize) {
        if let Some(rank) = &self.rank {
            rank.step.store(step, Ordering::Relaxed);
            rank.micro_batches.store(0, Ordering::Relaxed);
        }
    }

    /// Records that so many micro-batches of the next step have been asked for.
    pub(crate) fn note_micro_batches(&self, count: usize) {
        if let Some(rank) = &self.rank {
            rank.micro_batches.store(count, Ordering::Relaxed);
        }
    }

    /// Lets waits for other ranks take at least as long as some steps. `seconds` is how long one of this rank takes on paper.
    ///
    /// # Errors
    /// [`Failure::Ranks`] if ranks are lost.
    pub(crate) fn wait_for_steps(&self, seconds: f64) -> Result {
        let longest = self.everybodys(&seconds)?.into_iter().fold(0.0, f64::max);
        if let Some(rank) = &self.rank {
            rank.group.raise_timeout(long_wait(longest));
        }
        Ok(())
    }

    /// Agrees on something that all ranks must have done: if one has failed, all fail.
    ///
    /// # Errors
    /// This rank's failure, or else that of the first other rank that failed.
    pub(crate) fn agree<T>(&self, outcome: Result<T>) -> Result<T> {
        let Some(rank) = &self.rank else {
            return outcome;
        };
        let failed = outcome.as_ref().err().map(|failure| rank.words(failure));
        let said = match rank.share(&RankOutcome {
            failed: failed.clone(),
        }) {
            Ok(said) => said,
            // This rank's own failure says more.
            Err(lost) => return outcome.and(Err(lost)),
        };
        let Some(first) = said.into_iter().find_map(|said| said.failed) else {
            return outcome;
        };
        self.is_over.set(true);
        let is_own = first.rank == rank.group.rank();
        let has_another = failed.is_some_and(|own| own.reason != first.reason);
        match outcome {
            Err(own) if is_own || has_another => Err(own),
            _ => Err(first.into()),
        }
    }

    /// The values of all ranks, in order; the same on every rank.
    ///
    /// # Errors
    /// [`Failure::Ranks`] if ranks are lost.
    pub(crate) fn everybodys<T>(&self, own: &T) -> Result<Vec<T>>
    where
        T: Clone + Serialize + DeserializeOwned,
    {
        match &self.rank {
            None => Ok(vec![own.clone()]),
            Some(rank) => rank.share(own),
        }
    }

    /// The value of the first rank; the same on every rank.
    ///
    /// # Errors
    /// [`Failure::Ranks`] if ranks are lost.
    pub(crate) fn word_of_first(&self, word: &str) -> Result<String> {
        Ok(self.everybodys(&word.to_owned())?.swap_remove(0))
    }

    /// Refuses ranks that would not train the same. `facts` are names and values.
    ///
    /// # Errors
    /// [`Failure::RanksDiffer`] on all ranks, which names the difference and the ranks.
    pub(crate) fn compare(&self, facts: &BTreeMap<String, String>) -> Result {
        match differences::sentence(&self.everybodys(facts)?) {
            None => Ok(()),
            Some(sentence) => {
                self.is_over.set(true);
                Err(Failure::RanksDiffer(sentence))
            }
        }
    }

    /// If this rank only saw that others are lost, replaces the failure by the one of the rank that failed first.
    pub(crate) fn explain(&self, failure: Failure) -> Failure {
        match (&self.rank, failure) {
            (Some(rank), Failure::Ranks(error)) => match rank.culprit() {
                None => Failure::Ranks(rank.met(error)),
                Some(words) => Failure::LostRank {
                    words: Box::new(words),
                    error,
                },
            },
            (_, failure) => failure,
        }
    }

    /// Writes last words for the other ranks, before anything is dropped, unless they know of the failure.
    pub(crate) fn leave_words(&self, failure: &Failure) {
        if let (Some(rank), false) = (&self.rank, failure.is_of_all()) {
            rank.leave(rank.words(failure));
        }
    }

    /// Whether there are other ranks that do not know of a failure, so that it ends them.
    pub(crate) fn ends_others(&self, failure: &Failure) -> bool {
        self.size() > 1 && !self.all_know(failure)
    }

    /// Whether there are ranks, and all of them know that the job ends by a failure, so that none waits.
    pub(crate) fn all_know(&self, failure: &Failure) -> bool {
        self.has_ranks() && (self.is_over.get() || failure.is_of_all())
    }

    /// Records that all ranks have reached the same end.
    pub(crate) fn end_together(&self) {
        self.is_over.set(true);
    }

    /// The engine between ranks, and the bytes it was given for other ranks, counted at the library's calls.
    pub(crate) fn traffic(&self) -> Option<RanksRecord> {
        let group = &self.rank.as_ref()?.group;
        Some(RanksRecord {
            rank: group.rank(),
            size: group.size(),
            hostname: hostname(),
            engine: group.engine(),
            sent_bytes: group.sent_bytes(),
        })
    }
}

/// The weights of the largest part of the model: ranks gather no more at a time. None are gathered without ZeRO.
fn largest_part_bytes(config: &Config) -> usize {
    if config.collectives.zero == Some(Zero::Replicated) {
        return 0;
    }
    let architecture = Architecture::of(&config.model, Attention::default());
    let mut parts = BTreeMap::<Layer, usize>::new();
    for parameter in architecture.parameters.in_layout() {
        let dtype = parameter.dtype(config.dtype().into());
        let elements: usize = parameter.shape.iter().product();
        *parts.entry(parameter.part).or_default() += elements * dtype.size_in_bytes();
    }
    parts.into_values().max().unwrap_or(0)
}

fn start(config: &Config, device: Device, launch: &Launch) -> Result<Arc<dyn Group>> {
    let engine = match config.collectives.engine {
        RankEngine::Mpi => collectives::Engine::Mpi,
        RankEngine::Nccl => collectives::Engine::Nccl,
        RankEngine::Auto | RankEngine::Alone => collectives::Engine::Auto,
    };
    let device = match device {
        Device::Cpu => collectives::Device::Cpu,
        Device::Cuda { index } => collectives::Device::Cuda { ordinal: index },
    };
    let (parallel, of) = (config.parallel.clone(), launch.size);
    let patience = Patience::new(Duration::from_secs(config.collectives.timeout_s))
        .naming(move |number| parallel.name(memory::Rank { number, of }));
    let group = collectives::start(launch, engine, device, patience, largest_part_bytes(config))?;
    let rank = memory::Rank {
        number: launch.rank,
        of,
    };
    tracing::info!(
        "rank {} of {} on {}, over {}",
        config.parallel.name(rank),
        launch.size,
        hostname(),
        group.engine()
    );
    Ok(group)
}

impl OfJob {
    /// The values of all ranks, in order.
    fn share<T: Serialize + DeserializeOwned>(&self, own: &T) -> Result<Vec<T>> {
        let bytes = serde_json::to_vec(own).expect("plain data can be written as JSON");
        let read = |bytes: Vec<u8>| {
            serde_json::from_slice(&bytes).map_err(|error| {
                let message = format!(
                    "another rank speaks another language ({error}): all must run the same trainer"
                );
                Failure::Ranks(GroupError::Failed(message))
            })
        };
        self.group.share(&bytes)?.into_iter().map(read).collect()
    }

    /// Makes a panic of any thread end all ranks, because they would wait for this one.
    fn outlive_panics(self: &Arc<OfJob>) {
        let (rank, before) = (self.clone(), std::panic::take_hook());
        std::panic::set_hook(Box::new(move |panic| {
            before(panic);
            let failure = Failure::Defect(panic.to_string());
            rank.leave(rank.words(&failure));
            rank.group.abort(i32::from(failure.exit_code()));
        }));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use fakes::Threads;

    /// The results of all ranks, if each runs `act` with its own job.
    pub(crate) fn on_ranks<T: Send>(size: usize, act: impl Fn(&Job) -> T + Sync) -> Vec<T> {
        on_ranks_of(size, &ParallelConfig::default(), act)
    }

    /// The same in a grid.
    pub(super) fn on_ranks_of<T: Send>(
        size: usize,
        parallel: &ParallelConfig,
        act: impl Fn(&Job) -> T + Sync,
    ) -> Vec<T> {
        let groups = Threads::group(size);
        std::thread::scope(|scope| {
            let act = &act;
            let ranks = groups
                .into_iter()
                .map(|group| scope.spawn(move || act(&Job::of(Some(group), parallel.clone()))));
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    pub(super) fn rank(job: &Job) -> usize {
        job.rank().unwrap().number
    }

    #[test]
    fn where_one_fails_all_do_and_name_it() {
        let failures = on_ranks(3, |job| {
            let outcome = match rank(job) {
                1 => Err(Failure::Usage("no such folder".into())),
                rank => Ok(rank),
            };
            let failure = job.agree(outcome).unwrap_err();
            assert!(job.is_over.get());
            (failure.exit_code(), failure.to_string())
        });
        assert_eq!(failures[1], (2, "no such folder".into()));
        for other in [&failures[0], &failures[2]] {
            assert_eq!(other.0, 2);
            assert!(
                other.1.starts_with("rank 1 (") && other.1.ends_with("no such folder"),
                "{other:?}"
            );
        }
        assert_eq!(on_ranks(2, |job| job.agree(Ok(rank(job))).unwrap()), [0, 1]);
    }

    #[test]
    fn what_differs_is_named_with_its_ranks() {
        let refused = on_ranks(4, |job| {
            let micro = if rank(job) == 3 { "2" } else { "4" };
            let facts = [("batch.micro", micro), ("lr.peak", "1")];
            let facts = facts.map(|(key, value)| (key.into(), value.into())).into();
            job.compare(&facts).unwrap_err().to_string()
        });
        assert!(
            refused[0].contains("rank 3 has batch.micro 2, rank 0 has 4"),
            "{}",
            refused[0]
        );
        assert!(refused.iter().all(|one| *one == refused[0]));
    }

    #[test]
    fn the_first_rank_has_the_word() {
        assert_eq!(
            on_ranks(3, |job| job.word_of_first(&rank(job).to_string()).unwrap()),
            ["0"; 3]
        );
    }

    /// A rank that only saw another rank leave must name that one.
    #[test]
    fn last_words_name_the_culprit() {
        let folder = tempfile::tempdir().unwrap();
        let lost = || Failure::Ranks(GroupError::Late("rank 1 did not answer".into()));
        let told = on_ranks(2, |job| {
            job.leave_words_in(folder.path());
            match rank(job) {
                1 => job.leave_words(&Failure::Disk("the disk is gone".into())),
                _ => job.leave_words(&lost()),
            }
            job.word_of_first("").unwrap();
            job.explain(lost()).to_string()
        });
        assert!(
            told[0].contains("rank 1 (") && told[0].contains("the disk is gone"),
            "{}",
            told[0]
        );
        // The other rank's words only say that it lost this one.
        assert_eq!(told[1], "rank 1 did not answer");
        let text = std::fs::read_to_string(folder.path().join("rank-1.json")).unwrap();
        let words: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (&words["rank"], &words["exit_code"], &words["step"]),
            (&1.into(), &5.into(), &0.into())
        );
    }
}
