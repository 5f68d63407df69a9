//! The alignment that reads and writes past the page cache need, and aligned memory of our own.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

/// The alignment past the page cache if the system does not tell it: every disk accepts this one.
pub(crate) const BLOCK_BYTES: usize = 4096;

/// The alignment that a file needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Alignment {
    /// Of addresses.
    pub(crate) memory: usize,
    /// Of offsets and numbers of bytes.
    pub(crate) offset: usize,
}

impl Alignment {
    /// Asks the system for that of a file opened past the page cache.
    pub(crate) fn of(file: &File) -> Alignment {
        let mut told = MaybeUninit::<libc::statx>::zeroed();
        // SAFETY: the path is empty and ends in a zero; the call fills the struct, all of whose bytes are numbers.
        let told = unsafe {
            let (path, flags) = (c"".as_ptr(), libc::AT_EMPTY_PATH);
            let mask = libc::STATX_DIOALIGN;
            let result = libc::statx(file.as_raw_fd(), path, flags, mask, told.as_mut_ptr());
            (result == 0).then(|| told.assume_init())
        };
        let told = told.filter(|told| told.stx_mask & libc::STATX_DIOALIGN != 0);
        let or_block = |bytes: u32| match bytes as usize {
            0 => BLOCK_BYTES,
            bytes => bytes.min(BLOCK_BYTES),
        };
        Alignment {
            memory: told.map_or(BLOCK_BYTES, |told| or_block(told.stx_dio_mem_align)),
            offset: told.map_or(BLOCK_BYTES, |told| or_block(told.stx_dio_offset_align)),
        }
    }

    /// No alignment is needed.
    pub(crate) const NONE: Alignment = Alignment {
        memory: 1,
        offset: 1,
    };
}

/// Memory that begins at a multiple of [`BLOCK_BYTES`].
pub(crate) struct AlignedBytes {
    start: NonNull<u8>,
    layout: Layout,
}

impl AlignedBytes {
    /// So many uninitialised bytes, at least one.
    pub(crate) fn new(bytes: usize) -> AlignedBytes {
        let layout = Layout::from_size_align(bytes.max(1), BLOCK_BYTES);
        let layout = layout.expect("a few parts are less than all memory");
        // SAFETY: the size is not 0.
        let start = NonNull::new(unsafe { alloc(layout) });
        AlignedBytes {
            start: start.unwrap_or_else(|| handle_alloc_error(layout)),
            layout,
        }
    }

    pub(crate) fn pointer(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}
