//! Bytes on the disk are not in memory as well: neither in the process nor in the page cache. A test program of its
//! own, since it measures the whole process.

use kernels::BlockFile;
use scratch::{Access, ScratchFile, ScratchFolder};
use std::fs::File;
use std::os::fd::AsRawFd;

const MIB: usize = 1 << 20;

/// The most bytes of a file that may be in memory: a sixteenth of what is written and read.
const FEW_BYTES: usize = 32 * MIB;

fn resident_bytes() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = text.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

/// Bytes of a file that the page cache has.
fn cached_bytes(file: &ScratchFile, bytes: usize) -> usize {
    let file = File::open(file.path()).unwrap();
    let mut pages = vec![0u8; bytes / 4096];
    // SAFETY: maps the file, asks which pages are there without touching them, and unmaps it.
    unsafe {
        let (rights, flags) = (libc::PROT_READ, libc::MAP_SHARED);
        let start = libc::mmap(
            std::ptr::null_mut(),
            bytes,
            rights,
            flags,
            file.as_raw_fd(),
            0,
        );
        assert_ne!(start, libc::MAP_FAILED);
        assert_eq!(libc::mincore(start, bytes, pages.as_mut_ptr()), 0);
        libc::munmap(start, bytes);
    }
    4096 * pages.iter().filter(|page| **page & 1 == 1).count()
}

#[test]
fn what_is_written_and_read_is_not_resident() {
    let parent = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let bytes = 512 * MIB;
    let mut chunk = vec![1u8; 64 * MIB];
    for direct in [true, false] {
        let access = Access {
            engine: None,
            direct,
        };
        let folder = ScratchFolder::open_for(parent.path(), access).unwrap();
        let file = folder.create("states", bytes as u64).unwrap();
        let before = resident_bytes();
        for offset in (0..bytes).step_by(chunk.len()) {
            file.write_at(offset as u64, &chunk).unwrap();
        }
        for offset in (0..bytes).step_by(chunk.len()) {
            file.read_at(offset as u64, &mut chunk).unwrap();
        }
        let grown = resident_bytes().saturating_sub(before);
        assert!(
            grown < FEW_BYTES,
            "direct {direct}: {grown} bytes more are resident"
        );
        let cached = cached_bytes(&file, bytes);
        assert!(
            cached < FEW_BYTES,
            "direct {direct}: {cached} bytes are cached"
        );
        if !direct {
            // Shows that the measure works: bytes read in the usual way are cached, except those that the system has
            // reclaimed since.
            std::io::copy(&mut File::open(file.path()).unwrap(), &mut std::io::sink()).unwrap();
            let cached = cached_bytes(&file, bytes);
            assert!(
                cached >= FEW_BYTES,
                "read by others: only {cached} bytes are cached"
            );
        }
    }
}
