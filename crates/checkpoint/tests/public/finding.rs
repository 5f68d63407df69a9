//! Which checkpoint is taken, which stay, and who may write.

use crate::fixture::Moment;
use checkpoint::{
    CheckpointError, LockError, MODEL_LOCK, ModelLock, RunLock, find, find_any_together, glance,
    keep, saved, set_aside_after,
};
use collectives::Alone;
use files::{Disk, FileSystem};
use std::fs;
use std::path::Path;
use tempfile::{TempDir, tempdir};

fn run_with(steps: &[u64]) -> TempDir {
    let run = tempdir().unwrap();
    for &step in steps {
        Moment::new(step, step as u8)
            .save(&Disk, run.path())
            .unwrap();
    }
    run
}

fn folders(run: &Path) -> Vec<String> {
    let entries = Disk.list(&run.join("checkpoints")).unwrap();
    entries.into_iter().map(|entry| entry.name).collect()
}

#[test]
fn the_newest_whole_one_of_a_run_is_found() {
    let run = run_with(&[9, 10, 100]); // by number, not by name
    let found = find(run.path()).unwrap();
    assert_eq!(
        (found.checkpoint.state.step, found.passed_over.len()),
        (100, 0)
    );
    let config = run.path().join("checkpoints/step-100/config.json");
    fs::write(config, b"another").unwrap();
    let found = find(run.path()).unwrap();
    assert_eq!(
        (found.checkpoint.state.step, found.passed_over.len()),
        (10, 1)
    );
    let why = found.passed_over[0].to_string();
    assert!(
        why.contains("step-100` is not a whole checkpoint: `config.json` has 7 bytes"),
        "{why}"
    );

    let given = run.path().join("checkpoints/step-9");
    assert_eq!(find(&given).unwrap().checkpoint.state.step, 9);
    for step in [9, 10] {
        fs::remove_file(
            run.path()
                .join(format!("checkpoints/step-{step}/trainer_state.json")),
        )
        .unwrap();
    }
    let error = find(run.path()).unwrap_err();
    assert!(
        matches!(&error, CheckpointError::NoneWhole { passed_over, .. } if passed_over.len() == 3)
    );
    assert!(
        error
            .to_string()
            .contains("`trainer_state.json` is missing"),
        "{error}"
    );
    let error = find(&given).unwrap_err();
    assert!(matches!(error, CheckpointError::Damaged { .. }), "{error}");
}

#[test]
fn what_is_no_run_is_said_so() {
    let folder = tempdir().unwrap();
    let error = find(folder.path()).unwrap_err().to_string();
    assert!(
        error.contains("has no `manifest.json`; either it is no checkpoint at all"),
        "{error}"
    );
    let error = find(&folder.path().join("nowhere"))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("cannot read") && error.contains("nowhere"),
        "{error}"
    );
    fs::create_dir(folder.path().join("checkpoints")).unwrap();
    let error = find(folder.path()).unwrap_err().to_string();
    assert!(
        error.ends_with("has no whole checkpoint to go on from"),
        "{error}"
    );
}

#[test]
fn the_last_and_the_best_stay() {
    let run = run_with(&[1, 2, 3, 4, 5]);
    assert_eq!(keep(&Disk, run.path(), 5, 2, Some(1)).unwrap(), [2, 3]);
    assert_eq!(folders(run.path()), ["step-1", "step-4", "step-5"]);
    assert_eq!(keep(&Disk, run.path(), 5, 0, None).unwrap(), [1, 4]);
    assert_eq!(folders(run.path()), ["step-5"]);
    assert_eq!(
        keep(&Disk, &run.path().join("nowhere"), 5, 1, None).unwrap(),
        [0u64; 0]
    );
}

#[test]
fn later_ones_than_the_one_that_was_saved_do_not_push_it_out() {
    let run = run_with(&[10, 20, 30]);
    Moment::new(25, 9).save(&Disk, run.path()).unwrap();
    assert_eq!(keep(&Disk, run.path(), 25, 1, None).unwrap(), [10, 20]);
    assert_eq!(folders(run.path()), ["step-25", "step-30"]);
}

#[test]
fn a_run_that_goes_on_from_an_older_one_finds_its_own_again() {
    let run = run_with(&[10, 20, 30]);
    let aside = set_aside_after(&Disk, run.path(), 10).unwrap();
    assert_eq!(aside.len(), 2);
    assert_eq!(
        folders(run.path()),
        ["step-10", "step-20.superseded", "step-30.superseded"]
    );
    assert_eq!(find(run.path()).unwrap().checkpoint.state.step, 10);
    let again = Moment::new(20, 77);
    again.save(&Disk, run.path()).unwrap();
    set_aside_after(&Disk, run.path(), 10).unwrap(); // takes the place of the one aside
    let kept = checkpoint::Checkpoint::open(&aside[0]).unwrap();
    assert!(again.is_in(&kept));
}

#[test]
fn a_second_model_is_kept_out_of_the_folder() {
    let folder = tempdir().unwrap();
    let first = ModelLock::take(folder.path(), "--save-final").unwrap();
    let error = ModelLock::take(folder.path(), "--save-final").unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("name another folder with --save-final"),
        "{error}"
    );
    // The folder of a run may be that of its model.
    let run = RunLock::take(folder.path()).unwrap();
    drop(first);
    assert!(!folder.path().join(MODEL_LOCK).exists());
    // A file that a killed process left behind locks nothing.
    std::fs::write(folder.path().join(MODEL_LOCK), "1").unwrap();
    drop(ModelLock::take(folder.path(), "--out").unwrap());
    assert!(!folder.path().join(MODEL_LOCK).exists());
    drop(run);
}

#[test]
fn a_second_run_is_kept_out_of_the_folder() {
    let run = tempdir().unwrap();
    let first = RunLock::take(run.path()).unwrap();
    let error = RunLock::take(run.path()).unwrap_err();
    assert!(matches!(error, LockError::Held { .. }));
    let expected = format!(
        "another trainer (process {}) is writing into",
        std::process::id()
    );
    assert!(error.to_string().starts_with(&expected), "{error}");
    drop(first);
    RunLock::take(run.path()).unwrap();
    let error = RunLock::take(&run.path().join("nowhere")).unwrap_err();
    assert!(matches!(error, LockError::File { .. }), "{error}");
}

/// Where a run has nothing yet it begins; where all that it has is damaged, that is told.
#[test]
fn a_run_that_may_have_none() {
    let any = |run: &Path| find_any_together(run, &Alone);
    let empty = tempdir().unwrap();
    assert!(any(empty.path()).unwrap().is_none());
    assert!(any(&empty.path().join("nowhere")).unwrap().is_none());
    let run = run_with(&[3]);
    let folder = run.path().join("checkpoints");
    fs::create_dir(folder.join(".step-4.tmp")).unwrap();
    let found = any(run.path()).unwrap().unwrap();
    assert_eq!(found.checkpoint.state.step, 3);
    fs::rename(folder.join("step-3"), folder.join(".step-3.tmp")).unwrap();
    assert!(any(run.path()).unwrap().is_none(), "none was ever whole");
    fs::create_dir(folder.join("step-4")).unwrap();
    let error = any(run.path()).unwrap_err();
    assert!(
        matches!(error, CheckpointError::NoneWhole { .. }),
        "{error}"
    );
}

/// At a glance sizes count, and the bytes of one file.
#[test]
fn at_a_glance() {
    let run = run_with(&[3, 4, 5]);
    assert_eq!(saved(&Disk, run.path()).unwrap(), [3, 4, 5]);
    let folder = |step: u64| run.path().join(format!("checkpoints/step-{step}"));
    let seen = |path: &Path| glance(path, "config.json");
    assert_eq!(seen(run.path()), Some(folder(5)));
    assert_eq!(glance(run.path(), "a file that none has"), None);
    assert_eq!(seen(&run.path().join("checkpoints")), Some(folder(5)));
    assert_eq!(seen(&folder(4)), Some(folder(4)));
    let alter = |file: &Path, at: usize| {
        let mut bytes = fs::read(file).unwrap();
        bytes[at] ^= 1;
        fs::write(file, bytes).unwrap();
    };
    alter(&folder(5).join("config.json"), 0);
    assert_eq!(seen(run.path()), Some(folder(4)));
    let large = "optimizer-00001-of-00003.safetensors";
    assert!(folder(4).join(large).is_file());
    fs::write(folder(4).join(large), "short").unwrap();
    assert_eq!(seen(run.path()), Some(folder(3)));
    alter(&folder(3).join(large), 60);
    assert_eq!(seen(run.path()), Some(folder(3)), "that takes all bytes");
    assert!(find(run.path()).is_err());
    assert_eq!(seen(Path::new("nowhere")), None);
}
