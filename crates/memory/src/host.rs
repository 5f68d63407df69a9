//! A block of host memory.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// An owned, zeroed, page-aligned block of host memory.
///
/// Untyped on purpose: one slab serves every dtype. Pages cost nothing until they are written.
#[derive(Debug)]
pub struct HostBlock {
    pointer: NonNull<u8>,
    layout: Layout,
}

impl HostBlock {
    /// A block of `bytes`, or nothing if the system refuses.
    pub fn new(bytes: u64) -> Option<HostBlock> {
        let size = usize::try_from(bytes).ok()?.max(1);
        let layout = Layout::from_size_align(size, 4096).ok()?;
        // SAFETY: the layout's size is at least 1.
        let pointer = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(HostBlock { pointer, layout })
    }

    /// Its first byte.
    pub fn pointer(&self) -> NonNull<u8> {
        self.pointer
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this very layout.
        unsafe { dealloc(self.pointer.as_ptr(), self.layout) }
    }
}
