//! The power fails at every operation in turn.

use crate::fixture::Moment;
use checkpoint::{Checkpoint, CheckpointError, WholeCheckpoint, find, keep, set_aside_after};
use fakes::{Kept, PowerCut};
use files::{Disk, FileSystem};
use std::path::Path;
use tempfile::tempdir;

const ALWAYS: usize = usize::MAX;

/// What a disk may hold; several ways of some of it.
fn all_kept() -> impl Iterator<Item = Kept> {
    let extremes = [Kept::Durable, Kept::Names, Kept::Torn, Kept::All];
    extremes.into_iter().chain((0..4).map(Kept::Some))
}

pub fn run() -> &'static Path {
    Path::new("run")
}

/// A durable disk with a run that has saved these.
pub fn disk_with(moments: &[&Moment]) -> PowerCut {
    let disk = PowerCut::after(ALWAYS);
    disk.create_folder(run()).unwrap();
    for moment in moments {
        moment.save(&disk, run()).unwrap();
    }
    disk.restarted(ALWAYS)
}

/// Cuts the power at every operation of `work`, and shows what can be found afterwards to `check`, with the run's folder on
/// a real disk and whether the work was done. Then the run goes on from there: a later save succeeds and is found.
pub fn at_every_operation(
    before: &PowerCut,
    work: impl Fn(&PowerCut) -> Result<(), CheckpointError>,
    check: impl Fn(Result<WholeCheckpoint, CheckpointError>, &Path, bool),
) {
    let whole = before.restarted(ALWAYS);
    work(&whole).unwrap();
    let operations = whole.operations();
    assert!(operations > 1);
    for done in 0..=operations {
        let disk = before.restarted(done);
        let finished = work(&disk).is_ok();
        assert!(finished || disk.is_off());
        assert!(finished == (done == operations) || done < operations);
        for kept in all_kept() {
            let real = tempdir().unwrap();
            disk.materialise(kept, real.path()).unwrap();
            let run = real.path().join(run());
            check(find(&run), &run, finished);
            // Real syncs take their time.
            if kept == Kept::Torn && done.is_multiple_of(3) {
                goes_on(&run);
            }
        }
    }
}

/// The next save is not hindered by what was left, and removes it.
fn goes_on(run: &Path) {
    let next = Moment::new(9, 99);
    next.save(&Disk, run).unwrap();
    let found = find(run).unwrap();
    assert!(next.is_in(&found.checkpoint) && found.passed_over.is_empty());
    let names = Disk.list(&run.join("checkpoints")).unwrap();
    assert!(
        names.iter().all(|entry| !entry.name.starts_with('.')),
        "{names:?}"
    );
}

#[test]
fn the_first_save() {
    let new = Moment::new(1, 1);
    at_every_operation(
        &disk_with(&[]),
        |disk| new.save(disk, run()).map(drop),
        |found, _, finished| match found {
            Ok(found) => assert!(new.is_in(&found.checkpoint)),
            Err(error) => assert!(!finished, "{error}"),
        },
    );
}

#[test]
fn a_save_beside_another() {
    let (old, new) = (Moment::new(1, 1), Moment::new(2, 2));
    at_every_operation(
        &disk_with(&[&old]),
        |disk| new.save(disk, run()).map(drop),
        |found, _, finished| {
            let found = found.unwrap().checkpoint;
            assert!(new.is_in(&found) || !finished && old.is_in(&found));
        },
    );
}

#[test]
fn a_save_that_replaces_its_step() {
    let (earlier, old, new) = (Moment::new(1, 1), Moment::new(2, 2), Moment::new(2, 3));
    at_every_operation(
        &disk_with(&[&earlier, &old]),
        |disk| new.save(disk, run()).map(drop),
        |found, _, finished| {
            let found = found.unwrap().checkpoint; // of step 2 at every moment
            assert!(new.is_in(&found) || !finished && old.is_in(&found));
        },
    );
}

#[test]
fn removing_old_ones() {
    let moments = [1, 2, 3, 4].map(|step| Moment::new(step, step as u8));
    at_every_operation(
        &disk_with(&moments.each_ref()),
        |disk| keep(disk, run(), 4, 1, Some(2)).map(|removed| assert_eq!(removed, [1, 3])),
        |found, run, finished| {
            assert!(moments[3].is_in(&found.unwrap().checkpoint));
            let path = |step: usize| run.join(format!("checkpoints/step-{step}"));
            assert!(moments[1].is_in(&Checkpoint::open(&path(2)).unwrap()));
            for step in [1, 3] {
                let there = path(step).exists(); // then it is whole
                assert!(!there || moments[step - 1].is_in(&Checkpoint::open(&path(step)).unwrap()));
                assert!(!(there && finished));
            }
        },
    );
}

#[test]
fn setting_later_ones_aside() {
    let moments = [1, 2, 3].map(|step| Moment::new(step, step as u8));
    at_every_operation(
        &disk_with(&moments.each_ref()),
        |disk| set_aside_after(disk, run(), 1).map(|aside| assert_eq!(aside.len(), 2)),
        |found, run, finished| {
            let step = found.unwrap().checkpoint.state.step;
            assert!(step == 1 || !finished);
            for step in [2, 3] {
                let names = [format!("step-{step}"), format!("step-{step}.superseded")];
                let at = names.map(|name| run.join("checkpoints").join(name));
                let still = at
                    .iter()
                    .find(|path| path.exists())
                    .expect("nothing is removed");
                assert!(moments[step - 1].is_in(&Checkpoint::open(still).unwrap()));
            }
        },
    );
}

/// The tests above would see it.
#[test]
fn a_save_that_did_not_sync_is_lost() {
    let (old, new) = (Moment::new(1, 1), Moment::new(2, 2));
    let disk = disk_with(&[&old]);
    disk.lie();
    new.save(&disk, run()).unwrap();
    for (kept, whole) in [
        (Kept::Durable, false),
        (Kept::Names, false),
        (Kept::Torn, false),
        (Kept::All, true),
    ] {
        let real = tempdir().unwrap();
        disk.materialise(kept, real.path()).unwrap();
        let found = find(&real.path().join(run())).unwrap();
        assert_eq!(new.is_in(&found.checkpoint), whole, "{kept:?}");
        assert_eq!(
            found.passed_over.len(),
            usize::from(!whole && kept != Kept::Durable)
        );
    }
}
