//! Written bytes are read back: by both engines, past the page cache and through it, at any offsets.

use fakes::{DiskFault, Faults};
use kernels::BlockFile;
use scratch::{Access, Engine, ScratchFile, ScratchFolder};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

const MIB: usize = 1 << 20;

/// Every way in which a file can be read and written here. If the system refuses io_uring, as in many containers,
/// opening a folder with it must fail too.
fn each_access(test: impl Fn(Access)) {
    let place = tempfile::tempdir().unwrap();
    for engine in [Engine::Uring, Engine::Threads] {
        for direct in [true, false] {
            let access = Access {
                engine: Some(engine),
                direct,
            };
            match ScratchFolder::open_for(place.path().join("probe"), access) {
                Ok(_) => test(access),
                Err(refused) => {
                    assert_eq!(engine, Engine::Uring, "{refused}");
                    let chosen = create(place.path(), Access::default(), 1).engine();
                    assert_eq!(chosen, Engine::Threads, "{refused}");
                }
            }
        }
    }
}

/// Folders on a disk, and in memory where there is such a file system.
fn folders() -> Vec<tempfile::TempDir> {
    let on_disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let in_memory = tempfile::tempdir_in("/dev/shm").ok();
    [Some(on_disk), in_memory].into_iter().flatten().collect()
}

fn create(folder: &Path, access: Access, bytes: usize) -> Arc<ScratchFile> {
    let folder = ScratchFolder::open_for(folder, access).unwrap();
    let file = folder.create("file", bytes as u64).unwrap();
    assert!(access.engine.is_none_or(|engine| engine == file.engine()));
    file
}

/// Bytes without two equal blocks.
fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let words = std::iter::repeat_with(move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
        state.to_le_bytes()
    });
    let mut pattern: Vec<u8> = words.take(bytes / 8 + 1).flatten().collect();
    pattern.truncate(bytes);
    pattern
}

#[test]
fn what_is_written_is_read_wherever_it_begins_and_ends() {
    let bytes = 40 * MIB + 100;
    // Offset, number of bytes, and how far the memory is from a multiple of 4096.
    let places = [
        (0, 40 * MIB, 0),
        (4096, 3 * MIB, 0),
        (512, 4096, 512),
        (1, 1, 0),
        (4095, 2, 1),
        (4097, 2 * MIB + 3, 7),
        (MIB - 1, 20 * MIB, 64),
        (40 * MIB - 1, 101, 0),
        (8192, 0, 0),
    ];
    for folder in folders() {
        each_access(|access| {
            let file = create(folder.path(), access, bytes);
            let mut expected = vec![0; bytes];
            for (index, (offset, length, shift)) in places.into_iter().enumerate() {
                let mut memory = vec![0; length + 2 * 4096];
                let start = memory.as_ptr().align_offset(4096) + shift;
                let part = &mut memory[start..start + length];
                part.copy_from_slice(&pattern(length, index as u64));
                file.write_at(offset as u64, part).unwrap();
                expected[offset..offset + length].copy_from_slice(part);
                part.fill(0);
                file.read_at(offset as u64, part).unwrap();
                assert!(
                    *part == expected[offset..offset + length],
                    "{access:?}, {offset}"
                );
            }
            let mut all = vec![0; bytes];
            file.read_at(0, &mut all).unwrap();
            assert!(all == expected, "{access:?}: what lies around is untouched");
        });
    }
}

#[test]
fn threads_write_beside_one_another() {
    let folder = tempfile::tempdir().unwrap();
    each_access(|access| {
        let (parts, length) = (7, MIB + 333);
        let file = create(folder.path(), access, parts * length);
        std::thread::scope(|scope| {
            for part in 0..parts {
                let file = &file;
                scope.spawn(move || {
                    let bytes = pattern(length, part as u64);
                    file.write_at((part * length) as u64, &bytes).unwrap();
                });
            }
        });
        for part in 0..parts {
            let mut bytes = vec![0; length];
            file.read_at((part * length) as u64, &mut bytes).unwrap();
            assert!(bytes == pattern(length, part as u64), "{access:?}, {part}");
        }
    });
}

#[test]
fn nothing_is_read_or_written_beyond_the_end() {
    let folder = tempfile::tempdir().unwrap();
    each_access(|access| {
        let file = create(folder.path(), access, 2 * MIB);
        for offset in [2 * MIB as u64 - 1, 1 << 40, u64::MAX] {
            let read = file.read_at(offset, &mut [0; 2]).unwrap_err();
            let written = file.write_at(offset, &[0; 2]).unwrap_err();
            for error in [read, written] {
                assert_eq!(error.kind(), ErrorKind::InvalidInput);
                assert!(error.to_string().contains("2097152 bytes"), "{error}");
            }
        }
        assert_eq!(std::fs::metadata(file.path()).unwrap().len(), 2 << 20);
    });
}

/// The file is truncated while it is in use, as if a disk lost blocks.
#[test]
fn a_read_that_falls_short_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    each_access(|access| {
        let file = create(folder.path(), access, 8 * MIB);
        let other = std::fs::OpenOptions::new().write(true).open(file.path());
        other.unwrap().set_len(5 * MIB as u64).unwrap();
        let mut bytes = vec![0; 8 * MIB];
        let error = file.read_at(0, &mut bytes).unwrap_err();
        assert_eq!(
            error.kind(),
            ErrorKind::UnexpectedEof,
            "{access:?}: {error}"
        );
        file.read_at(0, &mut bytes[..5 * MIB]).unwrap();
    });
}

#[test]
fn faults_come_where_they_were_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let folder = ScratchFolder::open(folder.path()).unwrap();
    let faults = Faults::new(2, DiskFault::Short);
    let [one, two] = ["one", "two"].map(|name| faults.on(folder.create(name, 8192).unwrap()));
    one.write_at(0, &[3; 8192]).unwrap();
    two.write_at(0, &[4; 8192]).unwrap();
    let mut bytes = [0; 8192];
    let error = one.read_at(0, &mut bytes).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
    assert_eq!((bytes[4095], bytes[4096]), (3, 0));
    two.read_at(0, &mut bytes).unwrap();
    assert_eq!((bytes, faults.operations()), ([4; 8192], 4));
    let faults = Faults::new(0, DiskFault::Error(ErrorKind::StorageFull));
    let error = faults.on(one).write_at(0, &bytes).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StorageFull);
}
