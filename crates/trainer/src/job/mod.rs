//! The job that a run is a part of: ranks that begin, go on and end together. A run that is alone agrees with itself.

mod differences;
mod ended;
mod last_words;
mod steps;

pub use ended::Ended;
pub(crate) use steps::Begun;

use crate::failure::Failure;
use crate::last_words::{LastWords, hostname};
use collectives::{Alone, Group, GroupError, Launch};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use settings::{Config, Device, RankEngine};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The job of this process.
pub(crate) struct Job {
    /// None: there are no ranks.
    rank: Option<Arc<Rank>>,
    /// All ranks know that it ends, and why: none waits for another.
    is_over: Cell<bool>,
}

/// The last line but one of a rank's metrics: who it was, and what went through its engine.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", rename = "ranks")]
pub(crate) struct RanksRecord {
    rank: usize,
    size: usize,
    hostname: String,
    engine: String,
    /// Bytes that the engine's library was handed for other ranks.
    sent_bytes: u64,
}

/// What a rank knows of itself, for whatever ends it.
struct Rank {
    group: Arc<dyn Group>,
    /// Where it leaves its last words, once the run has a directory.
    directory: OnceLock<PathBuf>,
    /// Steps made.
    step: AtomicUsize,
}

/// Carries out what all ranks do, and ends the job: with a failure that the others do not know of at once, else together.
///
/// # Errors
/// [`Ended`], which has yet to leave the job.
pub(crate) fn together(
    job: Rc<Job>,
    act: impl FnOnce(&Rc<Job>) -> Result<(), Failure>,
) -> Result<(), Ended> {
    // The first rank may still be writing, and a launcher ends those that stay when others have left.
    match act(&job).and_then(|()| job.agree(Ok(()))) {
        Ok(()) => {
            job.finish();
            Ok(())
        }
        Err(failure) => {
            let failure = job.explain(failure);
            job.leave_words(&failure);
            Err(Ended::of(failure, job))
        }
    }
}

/// A rank's message where all must have succeeded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Said {
    /// Why it did not.
    failed: Option<LastWords>,
}

impl Job {
    /// Starts the group that a launcher made this process a rank of, and of one alone the group that the configuration asks
    /// for, if it does. After this a panic ends all ranks.
    ///
    /// # Errors
    /// [`Failure::Ranks`] if there is no engine, or other ranks do not come.
    pub(crate) fn start(
        config: &Config,
        device: Device,
        launch: Option<&Launch>,
    ) -> Result<Job, Failure> {
        let group = match launch {
            Some(launch) => Some(start(config, device, launch)?),
            None => config.ranks().map(|_| Arc::new(Alone) as Arc<dyn Group>),
        };
        let job = Job::of(group);
        if let Some(rank) = &job.rank {
            rank.outlive_panics();
        }
        Ok(job)
    }

    fn of(group: Option<Arc<dyn Group>>) -> Job {
        let rank = |group| Rank {
            group,
            directory: OnceLock::new(),
            step: AtomicUsize::new(0),
        };
        Job {
            rank: group.map(rank).map(Arc::new),
            is_over: Cell::new(false),
        }
    }

    /// What moves bytes between its ranks.
    pub(crate) fn group(&self) -> Option<Arc<dyn Group>> {
        Some(self.rank.as_ref()?.group.clone())
    }

    /// What it calls itself.
    pub(crate) fn engine(&self) -> Option<String> {
        Some(self.rank.as_ref()?.group.engine())
    }

    /// Which rank this is, where there are any.
    pub(crate) fn rank(&self) -> Option<memory::Rank> {
        let group = &self.rank.as_ref()?.group;
        Some(memory::Rank {
            number: group.rank(),
            of: group.size(),
        })
    }

    /// How many train together.
    pub(crate) fn size(&self) -> usize {
        self.rank().map_or(1, |rank| rank.of)
    }

    /// Whether this is the rank that writes what a run has once.
    pub(crate) fn leads(&self) -> bool {
        self.rank().is_none_or(|rank| rank.number == 0)
    }

    /// Whether there are ranks.
    pub(crate) fn has_ranks(&self) -> bool {
        self.rank.is_some()
    }

    /// Where last words are left, from now on.
    pub(crate) fn leave_words_in(&self, directory: &Path) {
        if let Some(rank) = &self.rank {
            // A run has one directory.
            let _ = rank.directory.set(directory.into());
        }
    }

    /// So many steps are made.
    pub(crate) fn note_step(&self, step: usize) {
        if let Some(rank) = &self.rank {
            rank.step.store(step, Ordering::Relaxed);
        }
    }

    /// What all ranks must have done: where one could not, none goes on.
    ///
    /// # Errors
    /// What this rank failed of, else what the first other one did.
    pub(crate) fn agree<T>(&self, outcome: Result<T, Failure>) -> Result<T, Failure> {
        let Some(rank) = &self.rank else {
            return outcome;
        };
        let failed = outcome.as_ref().err().map(|failure| rank.words(failure));
        let said = match rank.share(&Said {
            failed: failed.clone(),
        }) {
            Ok(said) => said,
            // What this rank failed of says more.
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

    /// What every rank says, in their order; the same for all.
    ///
    /// # Errors
    /// [`Failure::Ranks`] if ranks are lost.
    pub(crate) fn everybodys<T>(&self, own: &T) -> Result<Vec<T>, Failure>
    where
        T: Clone + Serialize + DeserializeOwned,
    {
        match &self.rank {
            None => Ok(vec![own.clone()]),
            Some(rank) => rank.share(own),
        }
    }

    /// What the first rank says; the same for all.
    ///
    /// # Errors
    /// [`Failure::Ranks`] if ranks are lost.
    pub(crate) fn word_of_first(&self, word: &str) -> Result<String, Failure> {
        Ok(self.everybodys(&word.to_owned())?.swap_remove(0))
    }

    /// Refuses ranks that would not train the same: `facts` of each has a name and a value.
    ///
    /// # Errors
    /// [`Failure::RanksDiffer`] on all ranks alike, naming what differs and who.
    pub(crate) fn compare(&self, facts: &BTreeMap<String, String>) -> Result<(), Failure> {
        match differences::sentence(&self.everybodys(facts)?) {
            None => Ok(()),
            Some(sentence) => {
                self.is_over.set(true);
                Err(Failure::RanksDiffer(sentence))
            }
        }
    }

    /// A failure that says who failed first, where this rank only saw that others are lost.
    pub(crate) fn explain(&self, failure: Failure) -> Failure {
        match (&self.rank, failure) {
            (Some(rank), Failure::Ranks(error)) => match rank.culprit() {
                None => Failure::Ranks(error),
                Some(words) => Failure::LostRank {
                    words: Box::new(words),
                    error,
                },
            },
            (_, failure) => failure,
        }
    }

    /// Leaves word of a failure for the other ranks, before anything is torn down, unless they know of it.
    pub(crate) fn leave_words(&self, failure: &Failure) {
        if let (Some(rank), false) = (&self.rank, failure.is_of_all()) {
            rank.leave(rank.words(failure));
        }
    }

    /// Whether there are other ranks, which do not know of a failure yet and are ended by it.
    pub(crate) fn ends_others(&self, failure: &Failure) -> bool {
        self.size() > 1 && !self.all_know(failure)
    }

    /// Whether there are ranks, all of which know that the job ends by a failure: none waits for another.
    pub(crate) fn all_know(&self, failure: &Failure) -> bool {
        self.has_ranks() && (self.is_over.get() || failure.is_of_all())
    }

    /// All ranks have come to the same end.
    pub(crate) fn end_together(&self) {
        self.is_over.set(true);
    }

    /// What moves bytes between ranks, and how many it was handed for others than this one: counted where the library is called.
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

fn start(config: &Config, device: Device, launch: &Launch) -> Result<Arc<dyn Group>, Failure> {
    let engine = match config.collectives.engine {
        RankEngine::Mpi => collectives::Engine::Mpi,
        RankEngine::Nccl => collectives::Engine::Nccl,
        RankEngine::Auto | RankEngine::Alone => collectives::Engine::Auto,
    };
    let device = match device {
        Device::Cpu => collectives::Device::Cpu,
        Device::Cuda { index } => collectives::Device::Cuda { ordinal: index },
    };
    let timeout = Duration::from_secs(config.collectives.timeout_s);
    let group = collectives::start(launch, engine, device, timeout)?;
    tracing::info!(
        "rank {} of {} on {}, over {}",
        launch.rank,
        launch.size,
        hostname(),
        group.engine()
    );
    Ok(group)
}

impl Rank {
    /// What every rank says, in their order.
    fn share<T: Serialize + DeserializeOwned>(&self, own: &T) -> Result<Vec<T>, Failure> {
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

    /// Makes a panic of any thread end all ranks: they would wait for this one.
    fn outlive_panics(self: &Arc<Rank>) {
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
mod tests {
    use super::*;
    use fakes::Threads;

    /// What ranks say where each carries out the same with its own job.
    pub(super) fn on_ranks<T: Send>(size: usize, act: impl Fn(&Job) -> T + Sync) -> Vec<T> {
        let groups = Threads::group(size);
        std::thread::scope(|scope| {
            let act = &act;
            let ranks = groups
                .into_iter()
                .map(|group| scope.spawn(move || act(&Job::of(Some(group)))));
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

    /// Who only saw others go names the one who went.
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
        // The other's words only say that it lost this one.
        assert_eq!(told[1], "rank 1 did not answer");
        let text = std::fs::read_to_string(folder.path().join("rank-1.json")).unwrap();
        let words: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (&words["rank"], &words["exit_code"], &words["step"]),
            (&1.into(), &5.into(), &0.into())
        );
    }
}
