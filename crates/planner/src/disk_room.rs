//! Checks whether disks have room for what a run keeps and saves there, before anything is loaded.

use memory::format_bytes;
use std::fmt::{self, Display, Formatter};
use std::io;
use std::path::{Path, PathBuf};

/// What is written to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Saved {
    /// Optimizer states, in scratch files.
    OptimizerStates,
    /// This many checkpoints at a time.
    Checkpoints(usize),
    /// A model in Hugging Face layout.
    Model,
}

/// Something to be written into a folder, which need not exist yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskNeed {
    /// What it is.
    pub what: Saved,
    /// Bytes of all of it.
    pub bytes: u64,
    /// Where it goes.
    pub folder: PathBuf,
}

impl DiskNeed {
    /// `bytes` to be written into a folder.
    pub fn new(what: Saved, bytes: u64, folder: &Path) -> DiskNeed {
        DiskNeed {
            what,
            bytes,
            folder: folder.into(),
        }
    }
}

impl Display for DiskNeed {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (bytes, folder) = (format_bytes(self.bytes), self.folder.display());
        match self.what {
            Saved::OptimizerStates => write!(f, "{bytes} of optimizer states in {folder}"),
            Saved::Checkpoints(1) => write!(f, "a checkpoint of {bytes} in {folder}"),
            Saved::Checkpoints(count) => {
                let each = format_bytes(self.bytes / count as u64);
                write!(f, "{count} checkpoints of {each} in {folder}")
            }
            Saved::Model => write!(f, "a model of {bytes} in {folder}"),
        }
    }
}

impl Saved {
    /// How to need less space.
    fn hint(self) -> &'static str {
        match self {
            Saved::OptimizerStates => {
                "name a folder on another disk with --offload-optimizer, or keep less there: --state-dtype 8bit, --master \
                 bf16-split or a lower offload.fraction"
            }
            // With one checkpoint kept, the next one is written beside it: two is the least.
            Saved::Checkpoints(1 | 2) => {
                "name a folder on another disk with --out, or save nothing: --save-every 0"
            }
            Saved::Checkpoints(_) => {
                "name a folder on another disk with --out, or keep fewer checkpoints: --keep-last 1, or a larger --save-every"
            }
            Saved::Model => "name a folder on another disk for the model",
        }
    }
}

/// Reports the space on disks.
pub trait Disks {
    /// The number of the disk that a folder is on, and how many bytes may be written there.
    ///
    /// # Errors
    /// If the system cannot report them.
    fn of(&self, folder: &Path) -> io::Result<(u64, u64)>;
}

/// The disks of this machine.
#[derive(Clone, Copy, Debug)]
pub struct SystemDisks;

impl Disks for SystemDisks {
    fn of(&self, folder: &Path) -> io::Result<(u64, u64)> {
        Ok((scratch::disk_of(folder)?, scratch::free_bytes(folder)?))
    }
}

/// A disk that has too little space.
#[derive(Debug, thiserror::Error)]
#[error(
    "the disk has no room for {}: it has {} free",
    listed(needs), format_bytes(*free_bytes)
)]
pub struct NoDiskRoom {
    /// What is to be written there; not empty.
    pub needs: Vec<DiskNeed>,
    /// Bytes that may be written there.
    pub free_bytes: u64,
}

fn listed(needs: &[DiskNeed]) -> String {
    let needs: Vec<String> = needs.iter().map(DiskNeed::to_string).collect();
    needs.join(" and ")
}

impl NoDiskRoom {
    /// What the user can do.
    pub fn hints(&self) -> Vec<String> {
        let less = self.needs.iter().map(|need| need.what.hint().to_string());
        let anyway = "free some space there; --force tries it anyway".to_string();
        less.chain([anyway]).collect()
    }

    /// Refuses what does not fit. Needs on one disk are added up. A disk that does not report its space is not checked.
    ///
    /// # Errors
    /// [`NoDiskRoom`].
    pub fn check(needs: &[DiskNeed], disks: &dyn Disks) -> Result<(), NoDiskRoom> {
        let told = needs.iter().filter(|need| need.bytes > 0);
        let told = told.filter_map(|need| Some((need, disks.of(&need.folder).ok()?)));
        let told: Vec<(&DiskNeed, (u64, u64))> = told.collect();
        for (_, (disk, _)) in &told {
            let here = told.iter().filter(|(_, (other, _))| other == disk);
            let needs: Vec<DiskNeed> = here.clone().map(|(need, _)| (*need).clone()).collect();
            let needed = needs
                .iter()
                .fold(0, |sum: u64, need| sum.saturating_add(need.bytes));
            // A killed run's files will be removed, so a scratch folder that has some reports more space than its disk.
            let free_bytes = here.map(|(_, (_, free))| *free).max().unwrap_or(u64::MAX);
            if free_bytes < needed {
                return Err(NoDiskRoom { needs, free_bytes });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A disk of 10 GiB at `/a` and one of 4 GiB at `/b`; other folders report nothing.
    struct Two;

    impl Disks for Two {
        fn of(&self, folder: &Path) -> io::Result<(u64, u64)> {
            match folder {
                folder if folder.starts_with("/a") => Ok((1, 10 * GIB)),
                folder if folder.starts_with("/b") => Ok((2, 4 * GIB)),
                _ => Err(io::ErrorKind::Unsupported.into()),
            }
        }
    }

    fn need(what: Saved, gib: u64, folder: &str) -> DiskNeed {
        DiskNeed::new(what, gib * GIB, Path::new(folder))
    }

    fn refusal(needs: &[DiskNeed]) -> String {
        let refused = NoDiskRoom::check(needs, &Two).unwrap_err();
        format!("{refused}; {}", refused.hints().join("; "))
    }

    #[test]
    fn what_goes_onto_one_disk_is_added_up() {
        let states = need(Saved::OptimizerStates, 3, "/a/states");
        let checkpoints = need(Saved::Checkpoints(3), 6, "/a/run");
        let model = need(Saved::Model, 2, "/a/model");
        let fits = [states.clone(), checkpoints.clone()];
        NoDiskRoom::check(&fits, &Two).unwrap();
        let all = [states, checkpoints, model.clone()];
        let refused = refusal(&all);
        for words in [
            "3.00 GiB of optimizer states in /a/states and 3 checkpoints of 2.00 GiB in /a/run and a model of 2.00 GiB in /a/model: \
             it has 10.0 GiB free",
            "--state-dtype 8bit",
            "--keep-last 1",
            "--force",
        ] {
            assert!(refused.contains(words), "{words}: {refused}");
        }
        let elsewhere = need(Saved::Model, 2, "/b/model");
        NoDiskRoom::check(&[&all[..2], &[elsewhere]].concat(), &Two).unwrap();
        let refused = refusal(&[model, need(Saved::Checkpoints(1), 5, "/b")]);
        assert!(
            refused.contains("a checkpoint of 5.00 GiB in /b: it has 4.00 GiB free")
                && refused.contains("--save-every 0")
                && !refused.contains("/a/model"),
            "{refused}"
        );
    }

    #[test]
    fn a_disk_that_does_not_tell_refuses_nothing() {
        NoDiskRoom::check(&[need(Saved::Model, 1 << 20, "/c")], &Two).unwrap();
        NoDiskRoom::check(&[need(Saved::Model, 0, "/a")], &Two).unwrap();
    }

    #[test]
    fn the_system_tells_also_of_a_folder_that_is_still_to_be_made() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("states");
        let need = |bytes| [DiskNeed::new(Saved::OptimizerStates, bytes, &folder)];
        NoDiskRoom::check(&need(1), &SystemDisks).unwrap();
        let refused = NoDiskRoom::check(&need(1 << 60), &SystemDisks).unwrap_err();
        assert!(refused.to_string().contains("1024 PiB"), "{refused}");
        assert!(!folder.exists(), "it was only asked for");
    }
}
