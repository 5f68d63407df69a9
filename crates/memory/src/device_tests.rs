//! A memory of a device, with a device that counts and refuses.

use crate::{
    Blocks, Category, Cause, DType, DeviceBytes, DeviceMarks, Memory, OutOfMemory, Refused, Space,
};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::rc::Rc;

/// A device whose memory is the process's own.
struct Card {
    total: u64,
    /// Held by other processes.
    foreign: u64,
    live: RefCell<HashMap<NonNull<u8>, (Space, u64)>>,
    allocations: Cell<u64>,
}

impl Card {
    fn new(total: u64, foreign: u64) -> Rc<Card> {
        Rc::new(Card {
            total,
            foreign,
            live: RefCell::default(),
            allocations: Cell::new(0),
        })
    }

    fn held(&self) -> u64 {
        let live = self.live.borrow();
        let held = live.values().filter(|(space, _)| *space == Space::Device);
        held.map(|(_, bytes)| bytes).sum()
    }
}

fn layout(bytes: u64) -> Layout {
    Layout::from_size_align(bytes as usize, 256).unwrap()
}

impl Blocks for Card {
    fn device(&self) -> &'static str {
        "CUDA"
    }

    fn allocate(&self, space: Space, bytes: u64) -> Result<NonNull<u8>, Refused> {
        assert!(bytes > 0 && bytes.is_multiple_of(256));
        let held = self.held();
        let free = self.total - self.foreign - held;
        if space == Space::Device && bytes > free {
            let total = self.total;
            let device_bytes = Some(DeviceBytes { total, free, held });
            return Err(Refused {
                device_bytes,
                error: None,
            });
        }
        self.allocations.set(self.allocations.get() + 1);
        // SAFETY: the size is above 0.
        let block = NonNull::new(unsafe { alloc_zeroed(layout(bytes)) }).unwrap();
        self.live.borrow_mut().insert(block, (space, bytes));
        Ok(block)
    }

    unsafe fn free(&self, space: Space, block: NonNull<u8>) {
        let (allocated, bytes) = self.live.borrow_mut().remove(&block).unwrap();
        assert_eq!(space, allocated);
        // SAFETY: allocated above with this very layout.
        unsafe { dealloc(block.as_ptr(), layout(bytes)) }
    }

    unsafe fn fill(&self, pointer: *mut u8, value: u8, bytes: u64) {
        // SAFETY: the caller's promise, and this device's memory is the process's own.
        unsafe { std::ptr::write_bytes(pointer, value, bytes as usize) }
    }

    fn reset_marks(&self) {
        self.allocations.set(0);
    }

    fn marks(&self) -> DeviceMarks {
        DeviceMarks {
            device_used_high_bytes: self.held(),
            driver_allocations: self.allocations.get(),
            ..DeviceMarks::default()
        }
    }
}

fn lease(memory: &Memory, elements: usize) -> Result<crate::Buffer, OutOfMemory> {
    memory.lease(Category::Temporary, "x", [elements], DType::F32)
}

#[test]
fn a_step_in_a_reserved_slab_asks_the_device_for_nothing() {
    let card = Card::new(1 << 20, 0);
    let memory = Memory::device(card.clone());
    let persistent = memory
        .lease_persistent(Category::Parameter, "w", [100], DType::F32)
        .unwrap();
    memory.reserve_slab(4096).unwrap();
    assert_eq!(memory.step_memory().device.unwrap().driver_allocations, 2);
    memory.begin_step();
    memory.set_poison(true);
    drop((lease(&memory, 10).unwrap(), lease(&memory, 900).unwrap()));
    let step = memory.step_memory();
    let marks = step.device.unwrap();
    assert_eq!(
        (marks.driver_allocations, marks.device_used_high_bytes),
        (0, 512 + 4096)
    );
    assert_eq!(step.peak.bytes, 512 + 256 + 3840);
    drop((persistent, memory));
    assert_eq!(card.held(), 0, "slab and leases go back to the device");
}

#[test]
fn a_full_device_is_explained_like_a_limit() {
    let card = Card::new(1 << 20, 1 << 10);
    let memory = Memory::device(card.clone());
    let kept = lease(&memory, 1000).unwrap();
    let error = lease(&memory, 1 << 18).unwrap_err();
    assert_eq!((error.cause, error.limit_bytes), (Cause::Capacity, None));
    assert_eq!(error.room(), Some((1 << 20) - (1 << 10)));
    let message = error.to_string();
    let parts = [
        "CUDA out of memory. Tried to allocate 1.00 MiB for `x`",
        "The device has 1.00 MiB",
        "this run holds 4.00 KiB",
        "hold 1.00 KiB",
    ];
    for part in parts {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert_eq!(memory.live_leases(), 1);
    drop(kept);
    assert!(
        memory.reserve_slab(1 << 20).is_err_and(|error| {
            error.name == "slab" && error.place.phase == crate::Phase::Load
        })
    );
    memory.set_limit(Some(512));
    let limited = lease(&memory, 1000).unwrap_err();
    assert_eq!(
        (limited.limit_bytes, limited.device_bytes),
        (Some(512), None)
    );
}

#[test]
fn other_processes_are_named() {
    let card = Card::new(8 << 30, 6 << 30);
    let memory = Memory::device(card);
    let error = lease(&memory, 3 << 28).unwrap_err();
    assert_eq!(error.cause, Cause::OtherProcess);
    let message = error.to_string();
    assert!(
        message.contains("other processes hold most of 6.00 GiB"),
        "{message}"
    );
}

#[test]
fn only_pinned_memory_of_a_device_can_be_read_by_the_processor() {
    let memory = Memory::device(Card::new(1 << 20, 0));
    let pinned = memory
        .lease_pinned(Category::OptimizerState, "m", [4], DType::F32)
        .unwrap();
    assert_eq!(pinned.view().slice::<f32>(), [0.0; 4]);
    let mut leased = lease(&memory, 4).unwrap();
    let refused = |read: &mut dyn FnMut()| {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(read)).unwrap_err();
        let message = panic.downcast_ref::<String>().unwrap();
        assert!(message.contains("device memory"), "{message}");
    };
    refused(&mut || assert!(leased.view().rows(1..2).slice::<f32>().is_empty()));
    refused(&mut || drop(leased.view().to_tensor()));
    refused(&mut || {
        leased
            .view_mut()
            .reshape([2, 2])
            .slice_mut::<f32>()
            .fill(1.0)
    });
}
