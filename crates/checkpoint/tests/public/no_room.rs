//! Disks that are full.

use crate::fixture::Moment;
use checkpoint::find;
use fakes::FullDisk;
use files::{Disk, FileSystem};
use std::path::Path;
use std::process::Command;
use std::{env, fs};
use tempfile::tempdir;

fn folders(run: &Path) -> Vec<String> {
    let entries = Disk.list(&run.join("checkpoints")).unwrap();
    entries.into_iter().map(|entry| entry.name).collect()
}

/// Bytes that a checkpoint takes.
fn size_of(moment: &Moment) -> u64 {
    let run = tempdir().unwrap();
    let path = moment.save(&Disk, run.path()).unwrap();
    let files = Disk.list(&path).unwrap().into_iter();
    files
        .map(|file| fs::metadata(path.join(file.name)).unwrap().len())
        .sum()
}

#[test]
fn a_full_disk_leaves_the_checkpoint_before() {
    let (run, old, new) = (tempdir().unwrap(), Moment::new(1, 1), Moment::new(2, 2));
    old.save(&Disk, run.path()).unwrap();
    let size = size_of(&new);
    for room in (0..size).step_by(53).chain([size - 1]) {
        let error = new
            .save(&FullDisk::new(Disk, room), run.path())
            .unwrap_err();
        assert!(error.is_full(), "{error}");
        assert_eq!(folders(run.path()), ["step-1"], "room for {room} of {size}");
        assert!(old.is_in(&find(run.path()).unwrap().checkpoint));
    }
    new.save(&FullDisk::new(Disk, size), run.path()).unwrap();
    assert!(new.is_in(&find(run.path()).unwrap().checkpoint));
}

/// Names the run's folder to the process that is limited.
const LIMITED: &str = "CHECKPOINT_TEST_LIMITED_RUN";

/// Runs itself once more, in a process that may write files of a few KiB only, and does not end when it tries.
#[test]
fn a_limit_on_the_size_of_files_is_a_full_disk() {
    let large = Moment::sized(2, 2, 64 << 10);
    if let Some(run) = env::var_os(LIMITED) {
        let error = large.save(&Disk, Path::new(&run)).unwrap_err();
        assert!(error.is_full(), "{error}");
        return;
    }
    let (run, old) = (tempdir().unwrap(), Moment::new(1, 1));
    old.save(&Disk, run.path()).unwrap();
    let mut limited = Command::new("sh");
    limited
        .args(["-c", "trap '' XFSZ; ulimit -f 64 && exec \"$0\" \"$@\""])
        .arg(env::current_exe().unwrap());
    limited
        .args([
            "--exact",
            "no_room::a_limit_on_the_size_of_files_is_a_full_disk",
        ])
        .env(LIMITED, run.path());
    let output = limited.output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
    assert_eq!(folders(run.path()), ["step-1"]);
    assert!(old.is_in(&find(run.path()).unwrap().checkpoint));
    large.save(&Disk, run.path()).unwrap();
}

#[test]
fn what_cannot_be_written_is_named() {
    let run = tempdir().unwrap();
    fs::write(run.path().join("checkpoints"), b"a file").unwrap();
    let error = Moment::new(1, 1).save(&Disk, run.path()).unwrap_err();
    assert!(
        !error.is_full() && error.to_string().contains("checkpoints`"),
        "{error}"
    );
}
