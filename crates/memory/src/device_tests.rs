//! Tests of a memory on a device. The device is a stand-in that counts and refuses.

use crate::{
    Blocks, Buffer, ByPhase, Category, Cause, DType, DeviceBytes, DeviceMarks, Layer, Memory,
    OutOfMemory, Parked, Phase, Place, Refused, Space, Stamp,
};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::rc::Rc;
use std::time::Duration;

/// A device whose memory is the process's own.
struct Card {
    total: u64,
    /// Bytes that other processes hold.
    foreign: u64,
    live: RefCell<HashMap<NonNull<u8>, (Space, u64)>>,
    allocations: Cell<u64>,
    /// Milliseconds of work enqueued so far.
    asked_ms: Cell<u64>,
    /// The time of each stamp in milliseconds; none for those that were given back.
    stamps: RefCell<Vec<Option<u64>>>,
    /// Places that have been entered but not left.
    places: RefCell<Vec<String>>,
}

impl Card {
    fn new(total: u64, foreign: u64) -> Rc<Card> {
        Rc::new(Card {
            total,
            foreign,
            live: RefCell::default(),
            allocations: Cell::new(0),
            asked_ms: Cell::new(0),
            stamps: RefCell::default(),
            places: RefCell::default(),
        })
    }

    fn work(&self, ms: u64) {
        self.asked_ms.set(self.asked_ms.get() + ms);
    }

    fn stamps_out(&self) -> usize {
        self.stamps.borrow().iter().flatten().count()
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
            let device_bytes = Some(DeviceBytes {
                total,
                free,
                held,
                page: 2 << 20,
            });
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
        // SAFETY: `allocate` used the same layout.
        unsafe { dealloc(block.as_ptr(), layout(bytes)) }
    }

    unsafe fn fill(&self, pointer: *mut u8, value: u8, bytes: u64) {
        // SAFETY: the caller promises a live block, and this device's memory is the process's own.
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

    fn stamp(&self) -> Option<Stamp> {
        let mut stamps = self.stamps.borrow_mut();
        let vacant = stamps.iter().position(Option::is_none);
        let number = vacant.unwrap_or_else(|| {
            stamps.push(None);
            stamps.len() - 1
        });
        stamps[number] = Some(self.asked_ms.get());
        Some(Stamp(number))
    }

    fn elapsed(&self, from: Stamp, to: Stamp) -> Option<Duration> {
        let stamps = self.stamps.borrow();
        Some(Duration::from_millis(stamps[to.0]? - stamps[from.0]?))
    }

    fn give_back_stamp(&self, stamp: Stamp) {
        let given_back = self.stamps.borrow_mut()[stamp.0].take();
        assert!(given_back.is_some(), "a stamp is given back once");
    }

    fn enter(&self, place: Place) {
        self.places.borrow_mut().push(place.to_string());
    }

    fn leave(&self) {
        assert!(self.places.borrow_mut().pop().is_some());
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
    let card = Card::new(4 << 20, 1 << 10);
    let memory = Memory::device(card.clone());
    let kept = lease(&memory, 1000).unwrap();
    let error = lease(&memory, 1 << 20).unwrap_err();
    assert_eq!((error.cause, error.limit_bytes), (Cause::Capacity, None));
    // Whole pages of 2 MiB.
    assert_eq!(error.room(), Some(2 << 20));
    let message = error.to_string();
    let parts = [
        "CUDA out of memory. Tried to allocate 4.00 MiB for `x`",
        "The device has 4.00 MiB",
        "this run holds 4.00 KiB",
        "hold 1.00 KiB",
    ];
    for part in parts {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert_eq!(memory.live_leases(), 1);
    drop(kept);
    assert!(
        memory.reserve_slab(4 << 20).is_err_and(|error| {
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

/// The suggested fixes leave room for memory that libraries will still take.
#[test]
fn a_shortage_beside_leases_is_explained_and_takes_of_the_room() {
    let card = Card::new(64 << 20, 0);
    let memory = Memory::device(card.clone());
    let _kept = lease(&memory, 1 << 20).unwrap();
    let refused = card.allocate(Space::Device, 64 << 20).unwrap_err();
    let error = memory.shortage("matrix products", 10 << 20, refused);
    assert_eq!(error.room(), Some(54 << 20));
    assert_eq!((error.cause, error.limit_bytes), (Cause::Capacity, None));
    let message = error.to_string();
    assert!(
        message.contains("Tried to allocate 10.0 MiB for `matrix products`"),
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
    refused(&mut || {
        leased
            .view_mut()
            .reshape([2, 2])
            .slice_mut::<f32>()
            .fill(1.0)
    });
}

/// Milliseconds of forward, recompute and backward.
fn passes_ms(time: ByPhase<Duration>) -> [u128; 3] {
    [time.forward, time.recompute, time.backward].map(|time| time.as_millis())
}

/// Enqueues a step's work: two layers forward, then two backward with a replay each.
fn passes(card: &Card, memory: &Memory, ms: u64) {
    for layer in 0..2 {
        let _place = memory.enter(Phase::Forward, Layer::Block(layer));
        card.work(ms);
    }
    for layer in 0..2 {
        let _place = memory.enter(Phase::Backward, Layer::Block(layer));
        card.work(10 * ms);
        {
            let _place = memory.enter(Phase::Recompute, Layer::Block(layer));
            card.work(100 * ms);
        }
        card.work(1000 * ms);
    }
}

#[test]
fn the_time_of_a_step_is_the_devices_and_can_be_read_a_step_later() {
    let card = Card::new(1 << 20, 0);
    let memory = Memory::device(card.clone());
    passes(&card, &memory, 7);
    assert_eq!(
        card.stamps_out(),
        0,
        "nothing is timed before the first step"
    );
    let step = |ms| {
        memory.begin_step();
        passes(&card, &memory, ms);
        memory.step_memory().phase_time
    };
    let (first, second) = (step(1), step(3));
    memory.begin_step();
    card.work(5);
    assert_eq!(passes_ms(first.read()), [2, 200, 2020]);
    assert_eq!(passes_ms(second.read()), [6, 600, 6060]);
    let held = card.stamps_out();
    drop(first);
    assert_eq!(
        (held - 1) / 2,
        held - card.stamps_out(),
        "a step's stamps are given back"
    );
    drop((second, step(1)));
    let most = card.stamps.borrow().len();
    (0..5).for_each(|_| drop(step(1)));
    assert_eq!(card.stamps.borrow().len(), most, "stamps are used again");
    drop(memory);
    assert_eq!(card.stamps_out(), 0);
}

/// A stamp costs a launch, so only a change of phase makes one.
#[test]
fn only_a_change_of_phase_is_stamped() {
    let card = Card::new(1 << 20, 0);
    let memory = Memory::device(card.clone());
    memory.begin_step();
    let _pass = memory.enter(Phase::Forward, Layer::Whole);
    let stamps = card.stamps_out();
    for layer in 0..9 {
        let _place = memory.enter(Phase::Forward, Layer::Block(layer));
    }
    assert_eq!(card.stamps_out(), stamps);
}

#[test]
fn places_are_told_to_the_device() {
    let card = Card::new(1 << 20, 0);
    let memory = Memory::device(card.clone());
    let pass = memory.enter(Phase::Forward, Layer::Whole);
    let layer = memory.enter(Phase::Forward, Layer::Block(3));
    assert_eq!(
        *card.places.borrow(),
        ["whole model, forward", "block 3, forward"]
    );
    drop((layer, pass));
    assert!(card.places.borrow().is_empty());
}

/// Two leases on the device, of which one is a gradient, and a pinned one.
fn persistent(memory: &Memory) -> Result<[Buffer; 3], OutOfMemory> {
    let (weights, gradients) = (Category::Parameter, Category::Gradient);
    Ok([
        memory.lease_persistent(weights, "weights", [100], DType::F32)?,
        memory.lease_pinned(Category::OptimizerState, "moments", [100], DType::F32)?,
        memory.lease_persistent(gradients, "gradients", [100], DType::F32)?,
    ])
}

/// A copy, as a device's kernels make it.
///
/// # Safety
/// Both sides have so many bytes, and nobody else uses them.
unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) -> Result<(), OutOfMemory> {
    // SAFETY: the caller's promise, and this device's memory is the process's own.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
    Ok(())
}

fn park(memory: &Memory) -> Result<Parked, OutOfMemory> {
    // SAFETY: no lease is being written.
    unsafe {
        memory.park(|to, from| {
            assert_eq!(to.len(), from.bytes());
            copy(to.as_mut_ptr(), from.pointer(), to.len())
        })
    }
}

#[test]
fn what_is_parked_leaves_the_device_and_comes_back() {
    let card = Card::new(1 << 20, 0);
    let memory = Memory::device(card.clone());
    let mut leases = persistent(&memory).unwrap();
    memory.reserve_slab(4096).unwrap();
    for (lease, value) in leases.iter_mut().zip([1, 2, 3]) {
        // SAFETY: it is this lease's memory.
        unsafe { lease.view_mut().pointer().write_bytes(value, 400) };
    }
    let pinned = leases[1].view().pointer();
    memory.refuse_after(0);
    let refused = park(&memory).err().unwrap();
    assert_eq!((refused.name, refused.space), ("weights", Space::Host));
    assert_eq!(memory.bytes_to_park(), 512);
    let parked = park(&memory).unwrap();
    assert_eq!(parked.bytes(), 512);
    drop((leases, memory));
    assert_eq!((card.held(), parked.bytes()), (0, 2 * 512));
    for granted in 0..4 {
        let memory = Memory::device(card.clone());
        memory.unpark(&parked);
        memory.refuse_after(granted);
        let Ok(leases) = persistent(&memory) else {
            assert_eq!(parked.bytes(), 2 * 512, "the pinned block is back");
            continue;
        };
        assert_eq!(granted, 3);
        assert_eq!(leases[1].view().pointer(), pinned, "the block itself");
        let first = |lease: &Buffer| {
            // SAFETY: it is this lease's memory.
            unsafe { lease.view().pointer().add(399).read() }
        };
        assert_eq!(leases.each_ref().map(first), [0, 2, 0]);
        // SAFETY: no lease is in use.
        unsafe {
            memory.fill_from_parked(&parked, |to, from| {
                copy(to.pointer(), from.as_ptr(), from.len())
            })
        }
        .unwrap();
        memory.end_parking(&parked);
        assert_eq!(leases.each_ref().map(first), [1, 2, 0]);
        assert_eq!((card.held(), parked.bytes()), (2 * 512, 0));
    }
    assert!(card.live.borrow().is_empty());
}
