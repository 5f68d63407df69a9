//! Nothing that was changed is loaded, and the file is named.

use crate::fixture::Moment;
use checkpoint::{Checkpoint, CheckpointError, Damage};
use files::Disk;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::{TempDir, tempdir};

fn saved() -> (TempDir, PathBuf) {
    let run = tempdir().unwrap();
    let path = Moment::new(5, 1).save(&Disk, run.path()).unwrap();
    Checkpoint::open(&path).unwrap();
    (run, path)
}

fn damage(path: &Path) -> Damage {
    match Checkpoint::open(path).unwrap_err() {
        CheckpointError::Damaged { damage, .. } => damage,
        other => panic!("{other}"),
    }
}

/// Puts a file as it was before, when dropped out of the loop's body.
fn restoring(path: &Path, body: impl FnOnce(&[u8])) {
    let whole = fs::read(path).unwrap();
    body(&whole);
    fs::write(path, whole).unwrap();
}

#[test]
fn every_file_is_missed_measured_and_hashed() {
    let (_run, path) = saved();
    let names: Vec<_> = Checkpoint::open(&path)
        .unwrap()
        .files()
        .iter()
        .map(|file| file.name.clone())
        .collect();
    assert_eq!(
        names.len(),
        4 + 4 + 2,
        "two indices of three shards, a small file, the state: {names:?}"
    );
    for name in names {
        let file = path.join(&name);
        restoring(&file, |whole| {
            fs::remove_file(&file).unwrap();
            assert_eq!(damage(&path), Damage::Missing(name.clone()));
            let (expected, found) = (whole.len() as u64, whole.len() as u64 - 1);
            fs::write(&file, &whole[1..]).unwrap();
            assert_eq!(
                damage(&path),
                Damage::Size {
                    name: name.clone(),
                    expected,
                    found
                }
            );
            for byte in 0..whole.len() {
                let mut flipped = whole.to_vec();
                flipped[byte] ^= 1 << (byte % 8);
                fs::write(&file, flipped).unwrap();
                assert_eq!(damage(&path), Damage::Changed(name.clone()));
            }
        });
    }
    Checkpoint::open(&path).unwrap();
}

#[test]
fn every_bit_of_the_manifest_counts() {
    let (_run, path) = saved();
    let file = path.join("manifest.json");
    restoring(&file, |whole| {
        for byte in 0..whole.len() {
            let mut changed = whole.to_vec();
            changed[byte] ^= 1 << (byte % 8);
            fs::write(&file, &changed).unwrap();
            assert!(Checkpoint::open(&path).is_err(), "byte {byte}");
            fs::write(&file, &whole[..byte]).unwrap();
            assert!(
                matches!(damage(&path), Damage::Manifest(_)),
                "cut at {byte}"
            );
        }
    });
    fs::remove_file(&file).unwrap();
    assert_eq!(damage(&path), Damage::NoManifest);
}

#[test]
fn swapped_and_foreign_files_are_named() {
    let (_run, path) = saved();
    let [first, second] = [1, 2].map(|shard| format!("optimizer-{shard:05}-of-00003.safetensors"));
    let aside = path.join(".aside"); // hidden files do not count
    fs::rename(path.join(&first), &aside).unwrap();
    fs::rename(path.join(&second), path.join(&first)).unwrap();
    fs::rename(&aside, path.join(&second)).unwrap();
    let (name, other) = (first, second);
    assert_eq!(damage(&path), Damage::Swapped { name, other });

    let (_run, path) = saved();
    fs::write(path.join(".DS_Store"), b"x").unwrap();
    Checkpoint::open(&path).unwrap();
    fs::write(path.join("model.safetensors"), b"x").unwrap();
    assert_eq!(damage(&path), Damage::Extra("model.safetensors".into()));
}

#[test]
fn a_folder_that_was_given_another_steps_name_is_refused() {
    let (_run, path) = saved();
    let other = path.with_file_name("step-6");
    fs::rename(&path, &other).unwrap();
    assert_eq!(damage(&other), Damage::OtherStep { name: 6, step: 5 });
    let free = path.with_file_name("the-good-one");
    fs::rename(&other, &free).unwrap();
    assert_eq!(Checkpoint::open(&free).unwrap().state.step, 5);
}

#[test]
fn a_later_format_is_not_guessed_at() {
    let (run, path) = saved();
    let file = path.join("manifest.json");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(
        &file,
        text.replacen("\"format_version\": 1", "\"format_version\": 7", 1),
    )
    .unwrap();
    let error = Checkpoint::open(&path).unwrap_err();
    assert!(
        matches!(error, CheckpointError::Newer { found: 7, .. }),
        "{error}"
    );
    assert!(
        error
            .to_string()
            .contains("has format version 7, and this program reads up to 2"),
        "{error}"
    );

    let mut later = Moment::new(6, 1);
    later.state.format_version = 3;
    let path = later.save(&Disk, run.path()).unwrap();
    let error = Checkpoint::open(&path).unwrap_err();
    assert!(
        matches!(error, CheckpointError::Newer { found: 3, .. }),
        "{error}"
    );
    let error = checkpoint::find(run.path()).unwrap_err(); // does not go back silently
    assert!(
        matches!(error, CheckpointError::Newer { found: 3, .. }),
        "{error}"
    );
}
