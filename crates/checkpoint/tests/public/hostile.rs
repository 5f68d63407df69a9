//! Manifests, states and folders that lie.

use crate::fixture::Moment;
use checkpoint::{Checkpoint, CheckpointError, Damage, find};
use files::Disk;
use proptest::prelude::*;
use std::fs;
use tempfile::tempdir;

/// A manifest's text with a checksum that is right.
fn sealed(body: &str) -> String {
    format!(
        "{body},\n  \"crc32\": \"{:08x}\"\n}}\n",
        crc32fast::hash(body.as_bytes())
    )
}

/// What a folder with these files is refused for.
fn refused(files: &[(&str, &[u8])]) -> CheckpointError {
    let folder = tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    Checkpoint::open(folder.path()).unwrap_err()
}

/// A manifest of step 1 that lists these.
fn manifest(files: &[(&str, u64, &str)]) -> String {
    let files: Vec<_> = files
        .iter()
        .map(|(name, bytes, crc32)| {
            serde_json::json!({"name": name, "bytes": bytes, "crc32": crc32}).to_string()
        })
        .collect();
    sealed(&format!(
        "{{\"format_version\": 1, \"step\": 1, \"files\": [{}]",
        files.join(",")
    ))
}

#[test]
fn names_that_lead_elsewhere_are_refused() {
    for name in [
        "../secret",
        "/etc/passwd",
        "a/b",
        "",
        ".",
        "..",
        "manifest.json",
    ] {
        let error = refused(&[(
            "manifest.json",
            manifest(&[(name, 0, "00000000")]).as_bytes(),
        )]);
        assert!(
            error.to_string().contains("is no name of a file"),
            "{error}"
        );
    }
    let twice = manifest(&[("a", 0, "00000000"), ("a", 0, "00000000")]);
    let error = refused(&[("manifest.json", twice.as_bytes()), ("a", b"")]);
    assert!(
        error
            .to_string()
            .contains("`a` is no name of a file, or there twice"),
        "{error}"
    );
}

#[test]
fn a_sealed_manifest_can_still_be_refused() {
    let no_state = manifest(&[("a", 0, "00000000")]);
    let error = refused(&[("manifest.json", no_state.as_bytes()), ("a", b"")]);
    assert!(error.to_string().contains("trainer_state.json"), "{error}");
    let state = format!("{:08x}", crc32fast::hash(b"{}"));
    let empty = manifest(&[("trainer_state.json", 2, &state)]);
    let error = refused(&[
        ("manifest.json", empty.as_bytes()),
        ("trainer_state.json", b"{}"),
    ]);
    assert!(
        matches!(
            &error,
            CheckpointError::Damaged {
                damage: Damage::State(_),
                ..
            }
        ),
        "{error}"
    );
    let huge = manifest(&[("a", u64::MAX, "00000000")]);
    let error = refused(&[("manifest.json", huge.as_bytes()), ("a", b"")]);
    assert!(
        matches!(
            &error,
            CheckpointError::Damaged {
                damage: Damage::Size { .. },
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_folder_in_a_files_place_is_a_missing_file() {
    let run = tempdir().unwrap();
    let path = Moment::new(1, 1).save(&Disk, run.path()).unwrap();
    fs::remove_file(path.join("config.json")).unwrap();
    fs::create_dir(path.join("config.json")).unwrap();
    let error = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(error.ends_with("`config.json` is missing"), "{error}");
}

proptest! {
    #[test]
    fn any_manifest_is_refused(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
        refused(&[("manifest.json", &bytes)]);
    }

    #[test]
    fn any_sealed_manifest_is_refused(body in "[\\[\\]{}:,\"a0-9_./-]{0,80}") {
        refused(&[("manifest.json", sealed(&body).as_bytes())]);
    }

    #[test]
    fn any_state_is_refused(state in proptest::collection::vec(any::<u8>(), 0..80)) {
        let crc32 = format!("{:08x}", crc32fast::hash(&state));
        let manifest = manifest(&[("trainer_state.json", state.len() as u64, &crc32)]);
        refused(&[("manifest.json", manifest.as_bytes()), ("trainer_state.json", &state)]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))] // of twenty names each: a save takes its time

    #[test]
    fn any_names_beside_a_checkpoint_are_passed_by(
        names in proptest::collection::hash_set("[.]?(step-[0-9x]{0,20}|[a-z.-]{1,8})([.](tmp|old|removed|x))?", 20),
    ) {
        let (run, moment) = (tempdir().unwrap(), Moment::new(1, 1));
        moment.save(&Disk, run.path()).unwrap();
        for name in names {
            fs::create_dir_all(run.path().join("checkpoints").join(name)).unwrap();
        }
        prop_assert!(moment.is_in(&find(run.path()).unwrap().checkpoint));
    }
}
