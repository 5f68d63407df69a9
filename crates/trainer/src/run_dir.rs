//! The directory that a run writes into.

use crate::decisions::Decided;
use crate::failure::{Failure, Result};
use crate::job::Job;
use crate::last_words::{forget, hostname};
use crate::leftovers::Leftovers;
use crate::log;
use checkpoint::{MODEL_LOCK, ModelLock, RunLock};
use planner::Plan;
use serde::Serialize;
use settings::Resume;
use std::path::{Path, PathBuf};

/// `--out`, or a new folder under `runs/`.
pub(crate) struct RunDir {
    path: PathBuf,
    /// This rank's own folder, if there are ranks.
    own: Option<PathBuf>,
    /// Keeps other runs out. Only the first rank has it.
    _lock: Option<RunLock>,
}

impl RunDir {
    /// Opens the directory of a new or resumed run. The first rank makes it, and tells the others its path.
    ///
    /// # Errors
    /// The failure of any rank.
    pub(crate) fn open(
        job: &Job,
        decided: &Decided,
        plan: &Plan,
        goes_on: Option<&Path>,
    ) -> Result<RunDir> {
        let make = || match goes_on {
            Some(run) => RunDir::reopen(run),
            None => RunDir::create(decided, plan),
        };
        let made = job.agree(job.leads().then(make).transpose())?;
        let path = made
            .as_ref()
            .map_or("".into(), |made| made.path.display().to_string());
        let path = PathBuf::from(job.word_of_first(&path)?);
        let mut directory = made.unwrap_or(RunDir {
            path,
            own: None,
            _lock: None,
        });
        if let Some(rank) = job.rank() {
            job.leave_words_in(&directory.path);
            let own = directory.path.join("ranks").join(rank.number.to_string());
            let seen = refuse_unseen(&directory.path);
            job.agree(seen.and_then(|()| begin_own(&own, plan)))?;
            directory.own = Some(own);
        }
        Ok(directory)
    }

    /// Makes the directory and writes the resolved configuration and the plan into it.
    fn create(decided: &Decided, plan: &Plan) -> Result<RunDir> {
        let out = decided.options.out.clone();
        let path = out.unwrap_or_else(|| new_folder(&decided.name));
        let begins_again = decided.options.resume == Some(Resume::Auto);
        Leftovers::of(&path, begins_again)?;
        make_folder(&path, "--out")?;
        let directory = RunDir::reopen(&path)?;
        // Another run may have started there before it was locked.
        Leftovers::of(&path, begins_again)?.remove(&path)?;
        directory.describe(decided, plan)?;
        Ok(directory)
    }

    /// The directory of a resumed run.
    fn reopen(run: &Path) -> Result<RunDir> {
        let lock = RunLock::take(run)?;
        forget(run);
        Ok(RunDir {
            path: run.into(),
            own: None,
            _lock: Some(lock),
        })
    }

    /// Writes the resolved configuration and the plan.
    pub(crate) fn describe(&self, decided: &Decided, plan: &Plan) -> Result {
        write(&self.path, "config.toml", &decided.config.to_toml()?)?;
        self.write_json("plan.json", plan)?;
        Ok(())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// This rank's own folder in the directory, if there are ranks.
    pub(crate) fn own(&self) -> Option<&Path> {
        self.own.as_deref()
    }

    /// The file for the gradients of a step.
    pub(crate) fn gradients(&self, step: usize) -> Result<PathBuf> {
        let folder = self.path.join("gradients");
        std::fs::create_dir_all(&folder).map_err(Failure::file(&folder))?;
        Ok(folder.join(format!("step-{step}.safetensors")))
    }

    /// Writes a record as JSON; returns its path.
    pub(crate) fn write_json(&self, name: &str, record: &impl Serialize) -> Result<PathBuf> {
        write(&self.path, name, &as_json(record)?)
    }
}

fn as_json(record: &impl Serialize) -> Result<String> {
    let json = serde_json::to_string_pretty(record);
    let json = json.map_err(|error| Failure::Usage(error.to_string()))?;
    Ok(json + "\n")
}

/// Writes a file into a folder; returns its path.
fn write(folder: &Path, name: &str, text: &str) -> Result<PathBuf> {
    let path = folder.join(name);
    // Renamed at the end, so that an existing file stays intact if there is no space. The name has the process's
    // number, because ranks may write the same file.
    let unfinished = folder.join(format!(".{name}.{}.tmp", std::process::id()));
    let written = std::fs::write(&unfinished, text);
    let written = written.and_then(|()| std::fs::rename(&unfinished, &path));
    written.map_err(Failure::file(&path))?;
    Ok(path)
}

/// Refuses a run directory that this rank cannot see, because the first rank made it on another machine.
fn refuse_unseen(path: &Path) -> Result {
    if path.join("config.toml").is_file() {
        return Ok(());
    }
    Err(Failure::Usage(format!(
        "the run directory {} that rank 0 made is not there on {}: name one with --out that all ranks see",
        path.display(),
        hostname()
    )))
}

/// Makes a rank's own folder, writes the rank's plan, and starts its log there.
fn begin_own(own: &Path, plan: &Plan) -> Result {
    std::fs::create_dir_all(own).map_err(Failure::file(own))?;
    write(own, "plan.json", &as_json(plan)?)?;
    let log = own.join("log.txt");
    log::keep_in(&log).map_err(Failure::file(log))
}

/// Makes the folder that `flag` names, before anything is computed for it.
pub(crate) fn make_folder(folder: &Path, flag: &str) -> Result {
    std::fs::create_dir_all(folder).map_err(|error| {
        let folder = folder.display();
        Failure::Usage(format!(
            "cannot make the folder {folder}: {error}; name another one with {flag}"
        ))
    })
}

/// Makes the folder that --out names for a model, and keeps other commands out of it.
///
/// # Errors
/// It is not empty, or another command writes into it.
pub(crate) fn make_model_folder(folder: &Path) -> Result<ModelLock> {
    make_folder(folder, "--out")?;
    let lock = ModelLock::take(folder, "--out")?;
    // Another command may have written there before it was locked.
    refuse_non_empty(folder)?;
    Ok(lock)
}

/// Files of a model in Hugging Face layout, in one file or in shards.
const MODEL_FILES: [&str; 4] = [
    "config.json",
    "adapter_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
];

/// Refuses a folder that has a model, because it may be all that is left of a long run. `companions` are files that
/// would be written with a model. The files of a model that was not written completely do not count.
pub(crate) fn refuse_model<'a>(folder: &Path, companions: impl Iterator<Item = &'a str>) -> Result {
    let is_there = |name: &&str| folder.join(name).symlink_metadata().is_ok();
    let is_cut_short = is_there(&".unfinished") && !is_there(&"config.json");
    match MODEL_FILES.into_iter().chain(companions).find(is_there) {
        None => Ok(()),
        Some(_) if is_cut_short => Ok(()),
        Some(name) => Err(Failure::Usage(format!(
            "{} has a model already ({name}), which --save-final would write over; name another folder, or remove it",
            folder.display()
        ))),
    }
}

/// Refuses a folder that is not empty, because its files may be the user's.
pub(crate) fn refuse_non_empty(folder: &Path) -> Result {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => {
            return Err(Failure::Usage(format!(
                "cannot use {} as a folder: {error}; name a new or empty one with --out",
                folder.display()
            )));
        }
    };
    // Locks, and the mark of a model that was not written completely, do not count.
    let left_behind = |name: std::ffi::OsString| {
        [".lock", MODEL_LOCK, ".unfinished"]
            .iter()
            .any(|own| name == *own)
    };
    let mut entries = entries.filter(|entry| {
        let name = entry.as_ref().map(std::fs::DirEntry::file_name);
        !name.is_ok_and(left_behind)
    });
    match entries.next() {
        None => Ok(()),
        Some(_) => Err(Failure::Usage(format!(
            "{} is not empty; name a new or empty folder with --out",
            folder.display()
        ))),
    }
}

/// `runs/<name>-<time>`, with a number if the folder exists.
fn new_folder(name: &str) -> PathBuf {
    let time = jiff::Timestamp::now().strftime("%Y%m%d-%H%M%S").to_string();
    let plain = Path::new("runs").join(format!("{name}-{time}"));
    let numbered = (2..).map(|number| Path::new("runs").join(format!("{name}-{time}-{number}")));
    let mut candidates = [plain].into_iter().chain(numbered);
    candidates
        .find(|path| !path.exists())
        .expect("the numbers do not end")
}
