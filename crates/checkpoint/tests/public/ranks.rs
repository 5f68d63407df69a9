//! Checkpoints that several ranks write: all of them, or none.

use crate::fixture::Moment;
use crate::power_cut::{at_every_operation, disk_with, run};
use checkpoint::{
    CheckpointError, JointCheckpoint, JointSaver, WholeCheckpoint, find, find_together,
};
use collectives::Group;
use fakes::{FullDisk, Threads};
use files::{Disk, FileSystem};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::tempdir;

const RANKS: usize = 3;

/// What every rank of a group made, in their order.
pub fn on_ranks<T: Send>(act: impl Fn(&Arc<dyn Group>) -> T + Sync) -> Vec<T> {
    let groups = Threads::group(RANKS);
    std::thread::scope(|scope| {
        let act = &act;
        let ranks = groups.iter().map(|group| scope.spawn(move || act(group)));
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Saves a moment by ranks, each to a disk of its own, in the background or at once. The first one is told when it is done.
fn save_somehow<D: FileSystem + 'static>(
    moment: &Moment,
    run: &Path,
    disk: impl Fn(usize) -> D + Sync,
    in_background: bool,
) -> Vec<Result<PathBuf, CheckpointError>> {
    on_ranks(|group| {
        let mut saver = JointSaver::new(group.clone(), Arc::new(disk(group.rank())));
        let is_told = Arc::new(AtomicBool::new(false));
        let told = is_told.clone();
        let checkpoint = JointCheckpoint {
            run: run.into(),
            state: moment.state.clone(),
            files: moment.files.clone(),
            published: Box::new(move || told.store(true, Ordering::Relaxed)),
        };
        let pieces = moment.pieces(group.rank(), group.size());
        let saved = match in_background {
            false => saver.save(checkpoint, &pieces),
            true => saver
                .begin(checkpoint, move |part| part.write(&pieces))
                .and_then(|()| until_done(&mut saver)),
        };
        let is_told = is_told.load(Ordering::Relaxed);
        assert_eq!(is_told, saver.leads() && saved.is_ok());
        saved
    })
}

/// Asks after a save as a run does between its steps.
fn until_done(saver: &mut JointSaver) -> Result<PathBuf, CheckpointError> {
    loop {
        if let Some(outcome) = saver.poll() {
            return outcome;
        }
        std::thread::yield_now();
    }
}

/// Saves a moment at once.
fn save<D: FileSystem + 'static>(
    moment: &Moment,
    run: &Path,
    disk: impl Fn(usize) -> D + Sync,
) -> Vec<Result<PathBuf, CheckpointError>> {
    save_somehow(moment, run, disk, false)
}

fn folders(run: &Path) -> Vec<String> {
    let entries = Disk.list(&run.join("checkpoints")).unwrap();
    entries.into_iter().map(|entry| entry.name).collect()
}

#[test]
fn what_ranks_have_is_put_together() {
    for in_background in [false, true] {
        is_put_together(in_background);
    }
}

fn is_put_together(in_background: bool) {
    let (run, moment) = (tempdir().unwrap(), Moment::of_ranks(4, 1, RANKS));
    for saved in save_somehow(&moment, run.path(), |_| Disk, in_background) {
        assert_eq!(saved.unwrap(), run.path().join("checkpoints/step-4"));
    }
    let files = fs::read_dir(run.path().join("checkpoints/step-4")).unwrap();
    let of_ranks = files.filter(|file| {
        let name = file.as_ref().unwrap().file_name();
        name.to_str().unwrap().starts_with("rank-")
    });
    assert_eq!(of_ranks.count(), RANKS);
    assert!(moment.is_in(&find(run.path()).unwrap().checkpoint));
    // Any number of ranks opens it.
    for found in on_ranks(|group| find_together(run.path(), &**group)) {
        let WholeCheckpoint {
            checkpoint,
            passed_over,
        } = found.unwrap();
        assert!(moment.is_in(&checkpoint) && passed_over.is_empty());
    }
}

/// The version says what can read it.
#[test]
fn only_programs_that_know_ranks_read_it() {
    let run = tempdir().unwrap();
    save(&Moment::of_ranks(1, 1, RANKS), run.path(), |_| Disk);
    Moment::new(2, 2).save(&Disk, run.path()).unwrap();
    for (step, version) in [(1, 2), (2, 1)] {
        for name in ["manifest.json", "trainer_state.json"] {
            let path = run.path().join(format!("checkpoints/step-{step}/{name}"));
            let json: serde_json::Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
            assert_eq!(json["format_version"], version, "{name} of step {step}");
        }
    }
}

#[test]
fn a_power_cut_at_any_operation() {
    let (old, new) = (Moment::new(1, 1), Moment::of_ranks(2, 2, RANKS));
    at_every_operation(
        &disk_with(&[&old]),
        |disk| {
            let mut saved = save_somehow(&new, run(), |_| disk.clone(), true);
            let first = saved.swap_remove(0);
            for other in saved {
                assert_eq!(other.is_ok(), first.is_ok(), "they fail together");
            }
            first.map(drop)
        },
        |found, _, finished| {
            let found = found.unwrap().checkpoint;
            assert!(new.is_in(&found) || !finished && old.is_in(&found));
        },
    );
}

/// A rank whose disk is full costs the checkpoint, and no other one.
#[test]
fn where_one_rank_fails_nothing_is_published() {
    let (run, old) = (tempdir().unwrap(), Moment::of_ranks(1, 1, RANKS));
    save(&old, run.path(), |_| Disk);
    for full in 0..RANKS {
        let new = Moment::of_ranks(2, 2, RANKS);
        let room = |rank| if rank == full { 100 } else { u64::MAX };
        let failed = save(&new, run.path(), |rank| FullDisk::new(Disk, room(rank)));
        for (rank, failed) in failed.into_iter().enumerate() {
            let error = failed.unwrap_err();
            assert!(error.is_full(), "{error}");
            let names_it = error.to_string().starts_with(&format!("rank {full}: "));
            assert_eq!(names_it, rank != full, "{error}");
        }
        assert_eq!(folders(run.path()), ["step-1"], "rank {full} was full");
    }
    assert!(old.is_in(&find(run.path()).unwrap().checkpoint));
}

/// Each rank verifies a part, and all learn what any found.
#[test]
fn damage_that_one_rank_finds_all_pass_over() {
    let run = tempdir().unwrap();
    let (old, new) = (Moment::of_ranks(1, 1, RANKS), Moment::of_ranks(2, 2, RANKS));
    save(&old, run.path(), |_| Disk);
    save(&new, run.path(), |_| Disk);
    let newest = run.path().join("checkpoints/step-2");
    for damaged in fs::read_dir(&newest).unwrap() {
        let path = damaged.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        let mut changed = bytes.clone();
        *changed.last_mut().unwrap() ^= 1;
        fs::write(&path, changed).unwrap();
        for found in on_ranks(|group| find_together(run.path(), &**group)) {
            let found = found.unwrap();
            assert!(old.is_in(&found.checkpoint), "{}", path.display());
            assert_eq!(found.passed_over.len(), 1);
        }
        fs::write(&path, bytes).unwrap();
    }
    assert!(new.is_in(&find(run.path()).unwrap().checkpoint));
}

/// A rank that sees another disk is named.
#[test]
fn a_rank_that_misses_a_file_is_named() {
    let (whole, empty) = (tempdir().unwrap(), tempdir().unwrap());
    save(&Moment::of_ranks(1, 1, RANKS), whole.path(), |_| Disk);
    let errors = on_ranks(|group| {
        let run = if group.rank() == 2 { &empty } else { &whole };
        find_together(run.path(), &**group).unwrap_err().to_string()
    });
    assert!(errors[0].contains("rank 2: "), "{}", errors[0]);
    assert!(errors[2].contains("No such file"), "{}", errors[2]);
}
