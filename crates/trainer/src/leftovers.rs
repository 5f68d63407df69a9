//! What earlier runs left in a folder that a run is to begin in. Nobody misses what a run wrote that made no step: it is
//! removed, so that the same folder can be named again. Anything else in the folder is somebody's, and is not touched.

use crate::failure::Failure;
use settings::load::{Source, load};
use std::fs::{DirEntry, FileType};
use std::io::{self, BufRead, BufReader, ErrorKind};
use std::path::{Path, PathBuf};

/// Files that a run writes into its directory, beside those whose names are made of numbers.
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

/// Files of a rank's own part.
const FILES_OF_A_RANK: [&str; 4] = [METRICS, "metrics.jsonl.tmp", "plan.json", "log.txt"];

/// What `--trace` draws.
const PICTURES: [&str; 3] = ["snapshot.pickle", "trace.json", "timeline.svg"];

/// Files that stay, and that a new run may find: a run's lock, and the mark of a model whose writing was cut short.
const MEANINGLESS: [&str; 2] = [".lock", ".unfinished"];

/// What a run left that has ended, and whose folder another run can take.
#[derive(Debug, Default)]
pub(crate) struct Leftovers {
    /// What it wrote.
    paths: Vec<PathBuf>,
    /// Steps that it wrote down.
    steps: usize,
    is_done: bool,
}

impl Leftovers {
    /// What is in a folder where a run may begin: nothing, or what a run left that made no step; or that made some and saved
    /// none, if that run is to begin again.
    ///
    /// # Errors
    /// [`Failure::Usage`] for a folder with anything else in it.
    pub(crate) fn of(folder: &Path, begins_again: bool) -> Result<Leftovers, Failure> {
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

    /// Removes them, and says so.
    ///
    /// # Errors
    /// [`Failure::File`].
    pub(crate) fn remove(self, folder: &Path) -> Result<(), Failure> {
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

/// What a run left in a folder; none if something is there that no run wrote, or that is worth keeping.
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
    // Whatever a run writes, it has locked the folder before.
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

/// Whether a folder is one that a run makes, with nothing else in it. One with a checkpoint is not: that is a run to go on with.
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

/// The name that a file gets when it is written: until then it is `.NAME.PROCESS.tmp`.
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

/// Whether a configuration is as a run writes it: one that somebody wrote or changed has other words in it.
fn is_as_written(path: &Path) -> bool {
    let again = |text: &str| {
        let source = Source::parse(String::new(), String::new(), text).ok()?;
        load(&source, &[], false).ok()?.config.to_toml().ok()
    };
    // Its bytes may have been lost with the machine's power.
    std::fs::read_to_string(path).is_ok_and(|text| text.is_empty() || again(&text) == Some(text))
}

/// Steps of a run by its metrics, and whether it was done.
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

    /// A folder that a run has locked, in which `make` makes `name`.
    fn looked(name: &str, make: fn(&Path) -> io::Result<()>) -> Option<Vec<PathBuf>> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(".lock"), "").unwrap();
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        make(&path).unwrap();
        look(folder.path()).unwrap().map(|left| left.paths)
    }

    /// A name alone does not say that a run wrote it.
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
