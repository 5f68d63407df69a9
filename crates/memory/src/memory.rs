//! The one place that hands out memory.

use crate::backing::Backing;
use crate::clock::PhaseClock;
use crate::history::{MemoryChange, Recorder};
use crate::state::{HeldLease, Life, MemoryState};
use crate::{
    Blocks, Buffer, ByPhase, Category, DType, DeviceMarks, Dims, History, Layer, LiveLease,
    OutOfMemory, Peak, Phase, PhaseTime, Place, Refused, Space,
};
use std::cell::RefCell;
use std::rc::Rc;

/// Hands out all memory that a training step touches, and records what is live.
///
/// Clones are cheap and share one state. One thread takes and gives back leases; kernels may use views in any number of
/// threads.
#[derive(Clone)]
pub struct Memory {
    pub(crate) state: Rc<RefCell<MemoryState>>,
}

/// What the ledger recorded since [`Memory::begin_step`].
#[derive(Clone, Debug)]
pub struct StepMemory {
    /// The instant of the highest device use.
    pub peak: Peak,
    /// Highest device use in each phase.
    pub phase_peaks: ByPhase<u64>,
    /// Bytes reserved for the slab. Before [`Memory::reserve_slab`], the bytes that a step's leases have needed so far.
    pub slab_bytes: u64,
    /// Highest use of pinned host memory.
    pub host_pinned_bytes: u64,
    /// Time spent in each phase; zero on [`Memory::shapes`].
    pub phase_time: PhaseTime,
    /// The device's own figures; none on [`Memory::host`] and [`Memory::shapes`].
    pub device: Option<DeviceMarks>,
}

impl Memory {
    fn new(backing: Backing) -> Memory {
        Memory {
            state: Rc::new(RefCell::new(MemoryState::new(backing))),
        }
    }

    /// Leases the process's own memory, for the CPU device. Until [`Memory::reserve_slab`], every lease has its own
    /// allocation.
    pub fn host() -> Memory {
        Memory::new(Backing::Host)
    }

    /// Leases a device's memory. Until [`Memory::reserve_slab`], every lease has its own block.
    pub fn device(blocks: Rc<dyn Blocks>) -> Memory {
        Memory::new(Backing::Device(blocks))
    }

    /// Leases no memory at all, with the same ledger and the same placement, for plans.
    pub fn shapes() -> Memory {
        Memory::new(Backing::Shapes)
    }

    /// Whether leases have no memory behind them.
    pub fn is_shapes(&self) -> bool {
        matches!(self.state.borrow().backing, Backing::Shapes)
    }

    /// Refuses leases that would bring the live device bytes above `limit`, as a full card would.
    pub fn set_limit(&self, limit: Option<u64>) {
        self.state.borrow_mut().limit = limit;
    }

    /// Grants `leases` leases, then refuses one as if the limit had been reached. Tests use it to show that any failed
    /// lease is explained and leaks nothing.
    pub fn refuse_after(&self, leases: usize) {
        self.state.borrow_mut().refuse_after = Some(leases);
    }

    /// Fills every lease with NaN (all bits set) before granting it. Tests use it to show that no result depends on a
    /// lease's old contents.
    pub fn set_poison(&self, poison: bool) {
        self.state.borrow_mut().poison = poison;
    }

    /// Reserves the slab, which holds the leases of every step. Called once, before step 1.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the system refuses.
    ///
    /// # Panics
    /// If a lease of a step is live, or a slab is reserved already: leases would overlap.
    pub fn reserve_slab(&self, bytes: u64) -> Result<(), OutOfMemory> {
        self.state.borrow_mut().reserve_slab(bytes)
    }

    /// Records a history from now on. Call it before the first lease. `clock` returns seconds and never goes back.
    pub fn keep_history(&self, clock: impl Fn() -> f64 + 'static) {
        self.state.borrow_mut().recorder = Some(Recorder::new(Box::new(clock)));
    }

    /// The events since [`Memory::keep_history`]; none if it was not called.
    pub fn history(&self) -> Option<History> {
        let state = self.state.borrow();
        state.recorder.as_ref().map(Recorder::history)
    }

    /// Explains a lack of memory outside of leases, such as a library's on its first use. The error reads as if a lease
    /// of `bytes` had been refused; `bytes` is the most that is still to come.
    pub fn shortage(&self, name: &'static str, bytes: u64, refused: Refused) -> OutOfMemory {
        self.state.borrow().shortage(name, bytes, refused)
    }

    /// Leases a tensor within a step. Its contents are unspecified.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the limit, the slab or the system refuses.
    pub fn lease(
        &self,
        category: Category,
        name: &'static str,
        shape: impl Into<Dims>,
        dtype: DType,
    ) -> Result<Buffer, OutOfMemory> {
        self.take(category, name, shape.into(), dtype, Life::Step)
    }

    /// Leases zeroed memory that lives across steps, before step 1.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the limit or the system refuses.
    pub fn lease_persistent(
        &self,
        category: Category,
        name: &'static str,
        shape: impl Into<Dims>,
        dtype: DType,
    ) -> Result<Buffer, OutOfMemory> {
        self.take(category, name, shape.into(), dtype, Life::Run)
    }

    /// Leases zeroed, pinned host memory that lives across steps, before step 1. It counts in [`Space::Host`]. On the
    /// CPU device it is ordinary memory.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the system refuses.
    pub fn lease_pinned(
        &self,
        category: Category,
        name: &'static str,
        shape: impl Into<Dims>,
        dtype: DType,
    ) -> Result<Buffer, OutOfMemory> {
        self.take(category, name, shape.into(), dtype, Life::RunPinned)
    }

    fn take(
        &self,
        category: Category,
        name: &'static str,
        dims: Dims,
        dtype: DType,
        life: Life,
    ) -> Result<Buffer, OutOfMemory> {
        let (grant, pointer) = self
            .state
            .borrow_mut()
            .take(category, name, dims, dtype, life)?;
        let held = HeldLease {
            state: self.state.clone(),
            grant,
        };
        Ok(Buffer::new(held, pointer, dims, dtype))
    }

    /// Enters a phase and a part of the model until the guard is dropped. Opens a `tracing` span of the same name.
    #[must_use = "the place is left when the guard is dropped"]
    pub fn enter(&self, phase: Phase, layer: Layer) -> PlaceGuard {
        let place = Place { phase, layer };
        let mut state = self.state.borrow_mut();
        let left = state.enter(place);
        if let Backing::Device(blocks) = &state.backing {
            blocks.enter(place);
        }
        let span = tracing::trace_span!("place", phase = phase.name(), %layer).entered();
        PlaceGuard {
            memory: self.clone(),
            left,
            _span: span,
        }
    }

    /// Restarts peaks and phase times.
    pub fn begin_step(&self) {
        let mut state = self.state.borrow_mut();
        state.ledger.begin_step();
        state.note(MemoryChange::BeginStep);
        state.clock = match &state.backing {
            Backing::Device(blocks) => {
                blocks.reset_marks();
                PhaseClock::device(blocks)
            }
            Backing::Host | Backing::Shapes => PhaseClock::host(),
        };
    }

    /// What was recorded since [`Memory::begin_step`].
    pub fn step_memory(&self) -> StepMemory {
        let state = self.state.borrow();
        StepMemory {
            peak: state.ledger.peak(),
            phase_peaks: state.ledger.phase_peaks(),
            slab_bytes: match state.slab.capacity() {
                u64::MAX => state.slab.high_water(),
                reserved => reserved,
            },
            host_pinned_bytes: state.ledger.host_peak_bytes(),
            phase_time: state.clock.time(),
            device: match &state.backing {
                Backing::Device(blocks) => Some(blocks.marks()),
                Backing::Host | Backing::Shapes => None,
            },
        }
    }

    /// What was live at the peak, largest first.
    pub fn largest_at_peak(&self) -> Vec<LiveLease> {
        self.state.borrow().ledger.largest_at_peak()
    }

    /// Device bytes leased now.
    pub fn live_bytes(&self) -> u64 {
        self.state.borrow().ledger.live_bytes(Space::Device)
    }

    /// Number of leases held now.
    pub fn live_leases(&self) -> usize {
        self.state.borrow().ledger.live_leases()
    }

    /// Where the step is.
    pub fn place(&self) -> Place {
        self.state.borrow().ledger.place()
    }
}

/// Leaves the place that it entered, when dropped.
pub struct PlaceGuard {
    memory: Memory,
    left: Place,
    _span: tracing::span::EnteredSpan,
}

impl Drop for PlaceGuard {
    fn drop(&mut self) {
        let mut state = self.memory.state.borrow_mut();
        state.enter(self.left);
        if let Backing::Device(blocks) = &state.backing {
            blocks.leave();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cause;

    #[test]
    fn a_limit_refuses_one_granule_too_many_and_names_the_lease() {
        let memory = Memory::host();
        memory.set_limit(Some(1024));
        let kept = memory
            .lease(Category::Activation, "kept", [128], DType::F32)
            .unwrap();
        let _place = memory.enter(Phase::Backward, Layer::Block(7));
        let error = memory
            .lease(Category::Temporary, "gate", [129], DType::F32)
            .unwrap_err();
        assert_eq!(
            (error.requested_bytes, error.name, error.cause),
            (768, "gate", Cause::Capacity)
        );
        let message = error.to_string();
        assert!(
            message.starts_with("CPU out of memory. Tried to allocate 768 B"),
            "{message}"
        );
        assert!(
            message.contains("`gate` (temporary; block 7, backward)"),
            "{message}"
        );
        assert!(
            message.contains("the largest being `kept` with 512 B"),
            "{message}"
        );
        assert_eq!(
            memory.live_leases(),
            1,
            "a refused lease leaves nothing behind"
        );
        drop(kept);
        memory
            .lease(Category::Temporary, "gate", [256], DType::F32)
            .unwrap();
    }

    #[test]
    fn leases_of_a_reserved_slab_reuse_its_addresses() {
        let memory = Memory::host();
        memory.reserve_slab(1024).unwrap();
        let first = memory
            .lease(Category::Temporary, "first", [64], DType::F32)
            .unwrap();
        let second = memory
            .lease(Category::Temporary, "second", [64], DType::F32)
            .unwrap();
        let address = first.view().pointer();
        assert_eq!(second.view().pointer(), address.wrapping_add(256));
        drop(first);
        let third = memory
            .lease(Category::Temporary, "third", [64], DType::F32)
            .unwrap();
        assert_eq!(third.view().pointer(), address);
        assert!(
            memory
                .lease(Category::Temporary, "large", [1024], DType::F32)
                .is_err()
        );
        assert_eq!(memory.step_memory().slab_bytes, 1024);
    }

    #[test]
    fn pinned_memory_is_a_space_of_its_own() {
        let memory = Memory::host();
        memory.set_limit(Some(0));
        let lease = |elements: usize| {
            memory.lease_pinned(Category::OptimizerState, "moments", [elements], DType::F32)
        };
        let pinned = lease(200).unwrap();
        assert_eq!(
            (memory.live_bytes(), memory.step_memory().host_pinned_bytes),
            (0, 1024)
        );
        memory.refuse_after(0);
        let error = lease(1).unwrap_err();
        assert_eq!((error.space, error.limit_bytes), (Space::Host, None));
        assert!(
            error.to_string().starts_with("Host out of memory. "),
            "{error}"
        );
        drop(pinned);
        assert_eq!(memory.live_leases(), 0);
    }

    #[test]
    fn a_tensor_larger_than_any_memory_is_refused() {
        let memory = Memory::shapes();
        let error = memory
            .lease(Category::Temporary, "x", [usize::MAX, 3], DType::F32)
            .unwrap_err();
        assert_eq!((error.cause, error.limit_bytes), (Cause::Host, None));
        assert!(error.to_string().contains("The system refused"), "{error}");
    }

    #[test]
    fn shapes_and_host_agree_on_every_figure() {
        let run = |memory: Memory| {
            let arena = memory
                .lease_persistent(Category::Parameter, "parameters", [1000], DType::F32)
                .unwrap();
            memory.begin_step();
            let place = memory.enter(Phase::Forward, Layer::Block(0));
            let a = memory
                .lease(Category::Activation, "a", [3, 100], DType::BF16)
                .unwrap();
            let b = memory
                .lease(Category::Temporary, "b", [7], DType::F32)
                .unwrap();
            drop(a);
            let c = memory
                .lease(Category::Temporary, "c", [2, 2, 2, 2], DType::F32)
                .unwrap();
            drop((arena, b, c, place));
            let step = memory.step_memory();
            (
                step.peak,
                step.phase_peaks,
                step.slab_bytes,
                memory.largest_at_peak(),
            )
        };
        assert_eq!(run(Memory::host()), run(Memory::shapes()));
    }

    /// A history forgets earlier steps, but keeps what lives across steps.
    #[test]
    fn a_history_has_what_lives_across_steps_and_the_last_step() {
        let memory = Memory::shapes();
        let now = Rc::new(std::cell::Cell::new(0.0));
        let clock = now.clone();
        memory.keep_history(move || {
            clock.set(clock.get() + 1.0);
            clock.get()
        });
        let arena = memory
            .lease_persistent(Category::Parameter, "parameters", [1000], DType::F32)
            .unwrap();
        for name in ["first", "second"] {
            memory.begin_step();
            let _place = memory.enter(Phase::Forward, Layer::Block(0));
            let lease = memory
                .lease(Category::Activation, name, [64], DType::F32)
                .unwrap();
            drop(lease);
        }
        let events = memory.history().unwrap().events;
        assert!(events.is_sorted_by(|a, b| a.at_s < b.at_s));
        let taken: Vec<_> = events
            .iter()
            .filter_map(|event| match event.change {
                MemoryChange::Take { lease, address, .. } => Some((lease.name, address)),
                _ => None,
            })
            .collect();
        let addresses = [crate::Address::Own, crate::Address::Slab { offset: 0 }];
        assert_eq!(
            taken,
            [("parameters", addresses[0]), ("second", addresses[1])]
        );
        let begun = events
            .iter()
            .filter(|event| event.change == MemoryChange::BeginStep);
        assert_eq!(begun.count(), 1);
        drop(arena);
    }

    #[test]
    fn poison_fills_a_lease_with_nan() {
        let memory = Memory::host();
        memory.set_poison(true);
        let lease = memory
            .lease(Category::Temporary, "x", [8], DType::F32)
            .unwrap();
        assert!(
            lease
                .view()
                .slice::<f32>()
                .iter()
                .all(|value| value.is_nan())
        );
    }
}
