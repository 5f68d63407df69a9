//! The matrix products of a step, listed without a device: what a rehearsal runs before memory is reserved.
//!
//! A step on shapes counts operations. Here it goes through the very launch code of the device, on addresses with no
//! memory behind them, so that sizes, strides and alignments are those of the run.

use super::{Driver, Gemm, Launch, LibraryAttention, Workspace};
use crate::{DiskCopy, Event, Exchange, KernelError, Queue, Reading};
use memory::{Blocks, DeviceMarks, Memory, Refused, Space, Stamp};
use std::cell::{Cell, RefCell};
use std::ptr::NonNull;
use std::rc::Rc;
use std::time::Duration;

/// A driver that does nothing, and keeps every product and every attention of a library that it is asked for. Clones share one list.
#[derive(Clone, Default)]
pub struct Listing {
    products: Rc<RefCell<Vec<Gemm>>>,
    attentions: Rc<RefCell<Vec<LibraryAttention>>>,
    rank: usize,
}

impl Listing {
    /// A memory to list products in: leases have addresses, and nothing behind them.
    pub fn memory() -> Memory {
        Memory::device(Rc::new(Addresses {
            next: Cell::new(memory::GRANULARITY_BYTES),
        }))
    }

    /// What is listed for a rank of a group.
    pub fn of_rank(rank: usize) -> Listing {
        Listing {
            rank,
            ..Listing::default()
        }
    }

    /// The products so far, in their order. Their pointers tell the alignment of a run's, and no more.
    pub fn products(&self) -> Vec<Gemm> {
        self.products.borrow().clone()
    }

    /// What a library of attention was asked for so far, in order.
    pub fn attentions(&self) -> Vec<LibraryAttention> {
        self.attentions.borrow().clone()
    }
}

impl Driver for Listing {
    unsafe fn launch(&self, _launch: &Launch) -> Result<(), KernelError> {
        Ok(())
    }

    unsafe fn gemm(&self, gemm: &Gemm, _workspace: Workspace) -> Result<(), KernelError> {
        self.products.borrow_mut().push(*gemm);
        Ok(())
    }

    unsafe fn attention(&self, attention: &LibraryAttention) -> Result<(), KernelError> {
        self.attentions.borrow_mut().push(*attention);
        Ok(())
    }

    unsafe fn copy_to_device(&self, _to: *mut u8, _bytes: &[u8]) -> Result<(), KernelError> {
        Ok(())
    }

    unsafe fn copy_to_host(&self, bytes: &mut [u8], _from: *const u8) -> Result<(), KernelError> {
        bytes.fill(0);
        Ok(())
    }

    unsafe fn clear(&self, _to: *mut u8, _bytes: usize) -> Result<(), KernelError> {
        Ok(())
    }

    unsafe fn start_copy(
        &self,
        _queue: Queue,
        _to: *mut u8,
        _from: *const u8,
        _bytes: usize,
    ) -> Result<(), KernelError> {
        Ok(())
    }

    unsafe fn start_disk(&self, _copy: DiskCopy) -> Result<(), KernelError> {
        Ok(())
    }

    fn rank(&self) -> usize {
        self.rank
    }

    unsafe fn start_exchange(&self, _exchange: Exchange) -> Result<(), KernelError> {
        Ok(())
    }

    unsafe fn start_read(&self, _from: *const u8, bytes: usize) -> Result<Reading, KernelError> {
        Ok(Reading::done(vec![0; bytes]))
    }

    fn record(&self, _queue: Queue) -> Result<Event, KernelError> {
        Ok(Event::PAST)
    }

    fn wait(&self, _queue: Queue, _event: Event) -> Result<(), KernelError> {
        Ok(())
    }

    fn finish(&self, _event: Event) -> Result<(), KernelError> {
        Ok(())
    }
}

/// Addresses that nobody may read or write, aligned like a device's. Page-locked memory has none behind it either: a
/// step copies it, and never looks at it.
struct Addresses {
    next: Cell<u64>,
}

impl Blocks for Addresses {
    fn device(&self) -> &'static str {
        "CUDA"
    }

    fn allocate(&self, _space: Space, bytes: u64) -> Result<NonNull<u8>, Refused> {
        let address = self.next.get();
        self.next.set(address + bytes);
        let pointer = std::ptr::without_provenance_mut(address as usize);
        Ok(NonNull::new(pointer).expect("addresses begin above 0"))
    }

    unsafe fn free(&self, _space: Space, _block: NonNull<u8>) {}

    unsafe fn fill(&self, _pointer: *mut u8, _value: u8, _bytes: u64) {}

    fn reset_marks(&self) {}

    fn marks(&self) -> DeviceMarks {
        DeviceMarks::default()
    }

    fn stamp(&self) -> Option<Stamp> {
        None
    }

    fn elapsed(&self, _from: Stamp, _to: Stamp) -> Option<Duration> {
        None
    }

    fn give_back_stamp(&self, _stamp: Stamp) {}
}
