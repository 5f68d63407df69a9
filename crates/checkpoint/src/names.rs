//! The names of folders in `RUN/checkpoints`.

use files::{FileSystem, FilesError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The folder of a run's checkpoints.
pub(crate) fn checkpoints(run: &Path) -> PathBuf {
    run.join("checkpoints")
}

/// The meaning of a name in that folder, with its step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Name {
    /// `.step-N.tmp`: being written.
    Temporary(u64),
    /// `.step-N.removed`: being removed.
    Removed(u64),
    /// `.step-N.old`: whole, and about to be replaced by a newer one of the same step.
    Old(u64),
    /// `step-N`: whole when it was saved.
    Saved(u64),
}

impl Name {
    pub(crate) fn parse(text: &str) -> Option<Name> {
        let hidden = text.strip_prefix('.');
        let (step, suffix) = match hidden {
            None => (text, None),
            Some(rest) => rest
                .rsplit_once('.')
                .map(|(step, suffix)| (step, Some(suffix)))?,
        };
        let step = step.strip_prefix("step-")?.parse().ok()?;
        let name = match suffix {
            None => Name::Saved(step),
            Some("tmp") => Name::Temporary(step),
            Some("removed") => Name::Removed(step),
            Some("old") => Name::Old(step),
            Some(_) => return None,
        };
        (name.text() == text).then_some(name) // not `step-007`
    }

    pub(crate) fn text(self) -> String {
        match self {
            Name::Temporary(step) => format!(".step-{step}.tmp"),
            Name::Removed(step) => format!(".step-{step}.removed"),
            Name::Old(step) => format!(".step-{step}.old"),
            Name::Saved(step) => format!("step-{step}"),
        }
    }
}

/// The names in a folder that have a meaning, in order; none if the folder does not exist.
pub(crate) fn list(disk: &dyn FileSystem, checkpoints: &Path) -> Result<Vec<Name>, FilesError> {
    let entries = match disk.list(checkpoints) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(FilesError::at("list", checkpoints))?,
    };
    let mut names: Vec<_> = entries
        .iter()
        .filter_map(|entry| Name::parse(&entry.name))
        .collect();
    names.sort();
    Ok(names)
}

/// Removes a checkpoint's folder. It is first renamed, so that a half removed one is never taken for a whole one.
pub(crate) fn discard(
    disk: &dyn FileSystem,
    checkpoints: &Path,
    name: Name,
) -> Result<(), FilesError> {
    let mut path = checkpoints.join(name.text());
    if let Name::Saved(step) | Name::Old(step) = name {
        let removed = checkpoints.join(Name::Removed(step).text());
        if disk.list(&removed).is_ok() {
            files::remove_tree(disk, &removed).map_err(FilesError::at("remove", &removed))?;
        }
        disk.rename(&path, &removed)
            .map_err(FilesError::at("rename", &path))?;
        disk.sync_folder(checkpoints)
            .map_err(FilesError::at("sync", checkpoints))?;
        path = removed;
    }
    files::remove_tree(disk, &path).map_err(FilesError::at("remove", &path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for name in [
            Name::Saved(7),
            Name::Temporary(0),
            Name::Removed(u64::MAX),
            Name::Old(12),
        ] {
            assert_eq!(Name::parse(&name.text()), Some(name));
        }
        for other in [
            "step-",
            "step-007",
            "step-+7",
            "step-7.old",
            ".step-7",
            ".step-7.tm",
            "step-7x",
            "step--1",
            "",
        ] {
            assert_eq!(Name::parse(other), None, "{other}");
        }
    }
}
