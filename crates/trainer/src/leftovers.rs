//! Handles what earlier runs left in the folder for a new run. Files of a run that made no step are worthless, and are
//! removed, so that the folder can be used again. Any other file may be the user's, and is not touched.

use crate::failure::{Failure, Result};
use settings::load::{Source, load};
use std::fs::{DirEntry, FileType};
use std::io::{self, BufRead, BufReader, ErrorKind};
use std::path::{Path, PathBuf};

/// Files that a run writes into its directory, besides those with numbers in their names.
const FILES: [&str; 6] = [
    SETTINGS,
    METRICS,
    "metrics.jsonl.tmp",
    "plan.json",
    "oom.json",
    "report.html",
];
const SETTINGS: &str = "config.toml";
const METRICS: &str = "metrics.jsonl";

/// Files in a rank's own folder.
const FILES_OF_A_RANK: [&str; 4] = [METRICS, "metrics.jsonl.tmp", "plan.json", "log.txt"];

/// The files that `--trace` writes.
const PICTURES: [&str; 3] = ["snapshot.pickle", "trace.json", "timeline.svg"];

/// Files that stay and that a new run may find: a run's lock, and the mark of a model that was not written completely.
const MEANINGLESS: [&str; 2] = [".lock", ".unfinished"];

/// What an ended run left in a folder that another run can use.
#[derive(Debug, Default)]
pub(crate) struct Leftovers {
    /// The files and folders that it wrote.
    paths: Vec<PathBuf>,
    /// Number of steps in its metrics.
    steps: usize,
    is_done: bool,
}

impl Leftovers {
    /// What is in a folder where a run may begin. That is nothing, or what a run left that made no step. If
    /// `begins_again`, it may also be a run that made steps but saved none.
    ///
    /// # Errors
    /// [`Failure::Usage`] if anything else is in the folder.
    pub(crate) fn of(folder: &Path, begins_again: bool) -> Result<Leftovers> {
        let looked = look(folder).map_err(|error| {
            Failure::Usage(format!(
                "cannot use {} as a folder: {error}; name a new or empty one with --out",
                folder.display()
            ))
        })?;
        let folder = folder.display();
        match looked {
            Some(left) if left.steps == 0 => Ok(left),
            Some(left) if begins_again && !left.is_done => Ok(left),
            Some(left) if begins_again => Err(Failure::Usage(format!(
                "the run in {folder} is done after {} steps, and saved none of them; name another folder with --out",
                left.steps
            ))),
            Some(_) => Err(Failure::Usage(format!(
                "{folder} is not empty; name a new or empty folder with --out, or add --resume auto to go on with the run in it"
            ))),
            None => Err(Failure::Usage(format!(
                "{folder} is not empty; name a new or empty folder with --out"
            ))),
        }
    }

    /// Removes them, and reports it.
    ///
    /// # Errors
    /// [`Failure::File`].
    pub(crate) fn remove(self, folder: &Path) -> Result {
        let folder = folder.display();
        match self.steps {
            _ if self.paths.is_empty() => return Ok(()),
            0 => tracing::info!("{folder} has what a run left that made no step: it is replaced"),
            steps => tracing::warn!(
                "the run in {folder} ended after {steps} steps, before any was saved: it begins again, and its records are replaced"
            ),
        }
        for path in &self.paths {
            let removed = match path.is_dir() {
                true => std::fs::remove_dir_all(path),
                false => std::fs::remove_file(path),
            };
            removed.map_err(Failure::file(path))?;
        }
        Ok(())
    }
}

/// What a run left in a folder; none if something there was not written by a run, or is worth keeping.
fn look(folder: &Path) -> io::Result<Option<Leftovers>> {
    let entries = match list(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Some(Leftovers::default())),
        entries => entries?,
    };
    let mut left = Leftovers::default();
    for (name, kind, path) in &entries {
        if MEANINGLESS.contains(&name.as_str()) || kind.is_dir() && list(path)?.is_empty() {
            continue;
        }
        let is_a_runs = match kind.is_dir() {
            true => is_folder_of_a_run(name, path)?,
            false => kind.is_file() && is_file_of_a_run(name, path),
        };
        if !is_a_runs {
            return Ok(None);
        }
        if name == METRICS {
            (left.steps, left.is_done) = recorded(path)?;
        }
        left.paths.push(path.clone());
    }
    // A run locks the folder before it writes anything.
    let is_locked = entries.iter().any(|(name, ..)| name == ".lock");
    Ok((is_locked || left.paths.is_empty()).then_some(left))
}

/// Names, kinds and paths in a folder.
fn list(folder: &Path) -> io::Result<Vec<(String, FileType, PathBuf)>> {
    let entry = |entry: io::Result<DirEntry>| {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        Ok((name, entry.file_type()?, entry.path()))
    };
    std::fs::read_dir(folder)?.map(entry).collect()
}

fn is_file_of_a_run(name: &str, path: &Path) -> bool {
    if name == SETTINGS {
        return is_as_written(path);
    }
    FILES.contains(&finished(name))
        || name.starts_with("events.out.tfevents.")
        || is_numbered(name, "rank-", ".json")
}

/// Whether a folder is one that a run makes, with nothing else in it, and without a checkpoint to resume.
fn is_folder_of_a_run(name: &str, path: &Path) -> io::Result<bool> {
    let allowed: fn(&str, FileType) -> bool = match name {
        "checkpoints" => |name, kind| {
            let ends = [".tmp", ".removed"];
            kind.is_dir() && ends.iter().any(|end| is_numbered(name, ".step-", end))
        },
        "memory" => |name, kind| kind.is_file() && PICTURES.contains(&name),
        "gradients" => |name, kind| kind.is_file() && is_numbered(name, "step-", ".safetensors"),
        "ranks" => {
            let ranks = list(path)?.into_iter();
            let mut are_ranks = ranks.map(|(name, kind, path)| {
                Ok(is_numbered(&name, "", "") && kind.is_dir() && is_part_of_a_rank(&path)?)
            });
            return are_ranks.try_fold(true, |all, is_rank: io::Result<bool>| Ok(all && is_rank?));
        }
        _ => return Ok(false),
    };
    let entries = list(path)?;
    Ok(entries.iter().all(|(name, kind, _)| allowed(name, *kind)))
}

fn is_part_of_a_rank(path: &Path) -> io::Result<bool> {
    let mut entries = list(path)?.into_iter();
    entries.try_fold(true, |all, (name, kind, path)| {
        let is_own = match kind.is_dir() {
            true => name == "memory" && is_folder_of_a_run(&name, &path)?,
            false => kind.is_file() && FILES_OF_A_RANK.contains(&finished(&name)),
        };
        Ok(all && is_own)
    })
}

/// The final name of a file, which is called `.NAME.PROCESS.tmp` while it is being written.
fn finished(name: &str) -> &str {
    let within = name
        .strip_prefix('.')
        .and_then(|name| name.strip_suffix(".tmp"));
    let parts = within.and_then(|name| name.rsplit_once('.'));
    parts
        .filter(|(_, process)| is_numbered(process, "", ""))
        .map_or(name, |(name, _)| name)
}

fn is_numbered(name: &str, before: &str, after: &str) -> bool {
    let number = name
        .strip_prefix(before)
        .and_then(|name| name.strip_suffix(after));
    number.is_some_and(|number| {
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

/// Whether a configuration is exactly as a run writes it. One that a user wrote or edited differs.
fn is_as_written(path: &Path) -> bool {
    let again = |text: &str| {
        let source = Source::parse(String::new(), String::new(), text).ok()?;
        load(&source, &[], false).ok()?.config.to_toml().ok()
    };
    // A power failure may have left the file empty.
    files::read_small_text(path).is_ok_and(|text| text.is_empty() || again(&text) == Some(text))
}

/// Number of steps in a run's metrics, and whether the run was completed.
fn recorded(metrics: &Path) -> io::Result<(usize, bool)> {
    let (mut steps, mut is_done) = (0, false);
    for line in BufReader::new(std::fs::File::open(metrics)?).split(b'\n') {
        let line = line?;
        steps += usize::from(line.starts_with(br#"{"kind":"step""#));
        is_done |= line.starts_with(br#"{"kind":"end","reason":"done""#);
    }
    Ok((steps, is_done))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Looks at a folder that a run has locked and in which `make` has made `name`.
    fn looked(name: &str, make: fn(&Path) -> io::Result<()>) -> Option<Vec<PathBuf>> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(".lock"), "").unwrap();
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        make(&path).unwrap();
        look(folder.path()).unwrap().map(|left| left.paths)
    }

    /// A name alone does not prove that a run wrote the file.
    #[test]
    fn what_has_a_name_of_a_run_but_another_kind_is_somebodys() {
        let file = |path: &Path| fs::write(path, "");
        let folder = |path: &Path| {
            fs::create_dir(path)?;
            fs::write(path.join("mine"), "")
        };
        let link = |path: &Path| std::os::unix::fs::symlink("/etc/hostname", path);
        let files = [
            "plan.json",
            "gradients/step-3.safetensors",
            "memory/trace.json",
            "ranks/1/log.txt",
            "ranks/1/memory/timeline.svg",
        ];
        for name in files {
            assert_eq!(
                looked(name, file).map(|paths| paths.len()),
                Some(1),
                "{name}"
            );
            assert_eq!(looked(name, folder), None, "{name} is a folder");
            assert_eq!(looked(name, link), None, "{name} is a link");
        }
        let staging = "checkpoints/.step-3.tmp";
        assert_eq!(looked(staging, folder).map(|paths| paths.len()), Some(1));
        assert_eq!(looked(staging, file), None);
        assert_eq!(looked(staging, link), None);
    }
}
