//! Tests of the tests' own disk, which forgets what was not synced.

use fakes::{Kept, PowerCut};
use files::{FileSystem, write_file};
use std::fs;
use std::path::Path;
use tempfile::tempdir;

/// The contents of `folder/file` on a disk, if it exists.
fn found(disk: &PowerCut, kept: Kept) -> Option<Vec<u8>> {
    let folder = tempdir().unwrap();
    disk.materialise(kept, folder.path()).unwrap();
    fs::read(folder.path().join("folder/file")).ok()
}

#[test]
fn what_was_not_synced_is_lost_or_torn_or_there() {
    let (disk, folder) = (PowerCut::after(usize::MAX), Path::new("folder"));
    disk.create_folder(folder).unwrap();
    let mut file = disk.create_file(&folder.join("file")).unwrap();
    file.write_all(b"abcdefgh").unwrap();
    assert_eq!(found(&disk, Kept::Durable), None);
    assert_eq!(found(&disk, Kept::Names), Some(vec![]));
    assert_eq!(found(&disk, Kept::Torn), Some(b"abcd\0\0\0\0".into()));
    assert_eq!(found(&disk, Kept::All), Some(b"abcdefgh".into()));
    file.sync().unwrap();
    assert_eq!(found(&disk, Kept::Names), Some(b"abcdefgh".into()));
    disk.sync_folder(folder).unwrap();
    assert_eq!(
        found(&disk, Kept::Durable),
        None,
        "the folder's own name is not durable"
    );
    disk.sync_folder(Path::new("")).unwrap();
    assert_eq!(found(&disk, Kept::Durable), Some(b"abcdefgh".into()));
    disk.remove_file(&folder.join("file")).unwrap();
    assert_eq!(found(&disk, Kept::Durable), Some(b"abcdefgh".into()));
    assert_eq!(found(&disk, Kept::All), None);
}

#[test]
fn it_stops_at_the_operation_that_was_chosen() {
    let disk = PowerCut::after(2);
    let error = write_file(&disk, Path::new(""), "file", b"abc").unwrap_err();
    assert!(error.to_string().contains("the power is off"), "{error}"); // created, written, not synced
    assert!(disk.is_off() && disk.operations() == 2);
}
