//! The state of a memory: what is leased, and the memory behind it.

use crate::backing::{Backing, OwnedBlock};
use crate::clock::PhaseClock;
use crate::history::{Address, MemoryChange, Recorder};
use crate::ledger::{Lease, Ledger};
use crate::parked::{Parked, PersistentLease};
use crate::view::Reach;
use crate::{
    Category, Cause, DType, Dims, OutOfMemory, Place, Refusal, Refused, Slab, Space, round_up,
};
use std::cell::RefCell;
use std::rc::Rc;

/// The state that all clones of a [`crate::Memory`] share.
pub(crate) struct MemoryState {
    pub(crate) ledger: Ledger,
    pub(crate) slab: Slab,
    /// The slab's memory, once it is reserved.
    slab_block: Option<OwnedBlock>,
    /// The live leases that live across steps, in the order in which they were granted.
    pub(crate) persistent: Vec<PersistentLease>,
    /// Their contents, while they are parked or taken again.
    pub(crate) parked: Option<Parked>,
    pub(crate) backing: Backing,
    pub(crate) limit: Option<u64>,
    /// Leases to grant before one is refused, for tests.
    pub(crate) refuse_after: Option<usize>,
    pub(crate) poison: bool,
    pub(crate) clock: PhaseClock,
    /// Present if somebody asked for a history.
    pub(crate) recorder: Option<Recorder>,
}

/// How long a lease lives, and in which memory it lies.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    /// In the slab, within a step.
    Step,
    /// In a block of device memory of its own, across steps.
    Run,
    /// In a block of pinned host memory of its own, across steps.
    RunPinned,
}

impl Life {
    fn space(self) -> Space {
        match self {
            Life::Step | Life::Run => Space::Device,
            Life::RunPinned => Space::Host,
        }
    }

    /// Where the lease's bytes are.
    fn address(self, offset: Option<u64>) -> Address {
        match (self, offset) {
            (_, Some(offset)) => Address::Slab { offset },
            (Life::RunPinned, None) => Address::Pinned,
            (Life::Step | Life::Run, None) => Address::Own,
        }
    }
}

/// How a lease's memory is held and given back.
enum Storage {
    /// A range of the slab.
    Slab,
    /// A block of its own, freed with the lease unless it is parked.
    Own(OwnedBlock),
    /// None: only shapes.
    Nothing,
}

/// A granted lease.
pub(crate) struct Grant {
    number: usize,
    /// Offset in the slab; none for a lease that lives across steps.
    offset: Option<u64>,
    bytes: u64,
    reach: Reach,
    storage: Storage,
}

/// A live lease, owned by a [`crate::Buffer`]. It ends when dropped.
pub(crate) struct HeldLease {
    pub(crate) state: Rc<RefCell<MemoryState>>,
    pub(crate) grant: Grant,
}

impl HeldLease {
    pub(crate) fn bytes(&self) -> u64 {
        self.grant.bytes
    }

    pub(crate) fn is_shape(&self) -> bool {
        matches!(self.grant.storage, Storage::Nothing)
    }

    pub(crate) fn reach(&self) -> Reach {
        self.grant.reach
    }

    pub(crate) fn recategorize(&self, category: Category) {
        let mut state = self.state.borrow_mut();
        let number = self.grant.number;
        state.ledger.recategorize(number, category);
        state.note(MemoryChange::Recategorize { number, category });
    }
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        self.state.borrow_mut().give_back(&mut self.grant);
    }
}

impl MemoryState {
    pub(crate) fn new(backing: Backing) -> MemoryState {
        MemoryState {
            ledger: Ledger::default(),
            slab: Slab::new(u64::MAX),
            slab_block: None,
            persistent: Vec::new(),
            parked: None,
            backing,
            limit: None,
            refuse_after: None,
            poison: false,
            clock: PhaseClock::host(),
            recorder: None,
        }
    }

    /// Records an event, if a history is kept.
    pub(crate) fn note(&mut self, change: MemoryChange) {
        if let Some(recorder) = &mut self.recorder {
            recorder.note(change);
        }
    }

    /// Enters a place, and returns the one that was left.
    pub(crate) fn enter(&mut self, place: Place) -> Place {
        let left = self.ledger.enter(place);
        self.note(MemoryChange::Enter(place));
        if !matches!(self.backing, Backing::Shapes) {
            self.clock.change(left.phase, place.phase);
        }
        left
    }

    /// Grants a lease: records it, places it, and finds its memory. Returns the grant and the address.
    pub(crate) fn take(
        &mut self,
        category: Category,
        name: &'static str,
        dims: Dims,
        dtype: DType,
        life: Life,
    ) -> Result<(Grant, *mut u8), OutOfMemory> {
        let space = life.space();
        let bytes = dims.bytes(dtype).map_or(u64::MAX, round_up);
        let lease = Lease {
            name,
            category,
            place: self.ledger.place(),
            space,
            bytes,
        };
        if bytes == u64::MAX {
            return Err(self.refuse(lease, Cause::Host, None));
        }
        if self.injects_refusal() || self.exceeds_limit(space, bytes) {
            return Err(self.refuse(lease, Cause::Capacity, None));
        }
        let offset = match life {
            Life::Step => match self.slab.place(bytes) {
                Some(offset) => Some(offset),
                None => return Err(self.refuse(lease, Cause::Fragmentation, None)),
            },
            Life::Run | Life::RunPinned => None,
        };
        let (storage, pointer) = match self.find(&lease, offset) {
            Ok(found) => found,
            Err(refused) => {
                if let Some(offset) = offset {
                    self.slab.free(offset, bytes);
                }
                return Err(self.refuse_block(lease, refused));
            }
        };
        if self.poison && life == Life::Step {
            self.backing.poison(pointer, bytes);
        }
        let number = self.ledger.take(lease);
        if offset.is_none() {
            self.persistent.push(PersistentLease {
                number,
                place: self.persistent.len(),
                lease,
                pointer,
            });
        }
        self.note(MemoryChange::Take {
            number,
            lease,
            address: life.address(offset),
        });
        let grant = Grant {
            number,
            offset,
            bytes,
            reach: self.backing.reach(space),
            storage,
        };
        Ok((grant, pointer))
    }

    /// Finds the memory of a lease: in the slab, or a block of its own, which may have been parked.
    fn find(&self, lease: &Lease, offset: Option<u64>) -> Result<(Storage, *mut u8), Refused> {
        if let (Some(slab), Some(offset)) = (&self.slab_block, offset) {
            return Ok((Storage::Slab, slab.pointer().wrapping_add(offset as usize)));
        }
        let parked = self.parked.as_ref().filter(|_| offset.is_none());
        let parked = parked.and_then(|parked| parked.take_block(self.persistent.len(), lease));
        let block = match parked {
            Some(block) => Some(block),
            None => self.backing.block(lease.space, lease.bytes)?,
        };
        Ok(match block {
            Some(block) => {
                let pointer = block.pointer();
                (Storage::Own(block), pointer)
            }
            None => (Storage::Nothing, std::ptr::null_mut()),
        })
    }

    /// A block that no plan counts; a refusal reads as if it were this lease's.
    pub(crate) fn block_beside(&mut self, lease: Lease) -> Result<Option<OwnedBlock>, OutOfMemory> {
        let block = match self.injects_refusal() {
            true => Err(Refused {
                device_bytes: None,
                error: None,
            }),
            false => self.backing.block(lease.space, lease.bytes),
        };
        block.map_err(|refused| self.refuse_block(lease, refused))
    }

    /// Reserves the slab: [`crate::Memory::reserve_slab`].
    pub(crate) fn reserve_slab(&mut self, bytes: u64) -> Result<(), OutOfMemory> {
        assert!(
            self.slab.is_empty(),
            "the slab is reserved before the first lease of a step"
        );
        assert_eq!(self.slab.capacity(), u64::MAX, "the slab is reserved once");
        self.slab_block = match self.backing.block(Space::Device, bytes) {
            Ok(block) => block,
            Err(refused) => {
                let lease = Lease {
                    name: "slab",
                    category: Category::Temporary,
                    place: self.ledger.place(),
                    space: Space::Device,
                    bytes,
                };
                return Err(self.refuse_block(lease, refused));
            }
        };
        self.slab = Slab::new(bytes);
        self.note(MemoryChange::ReserveSlab { bytes });
        Ok(())
    }

    /// Ends a lease.
    pub(crate) fn give_back(&mut self, grant: &mut Grant) {
        self.ledger.give_back(grant.number);
        self.note(MemoryChange::GiveBack {
            number: grant.number,
        });
        match grant.offset {
            Some(offset) => self.slab.free(offset, grant.bytes),
            None => self.end_persistent(grant),
        }
    }

    /// Ends a lease that lives across steps. What is pinned stays parked, if the others are.
    fn end_persistent(&mut self, grant: &mut Grant) {
        let mut leases = self.persistent.iter();
        let index = leases.position(|held| held.number == grant.number);
        let ended = self
            .persistent
            .remove(index.expect("it is listed while it lives"));
        if let (Some(parked), Space::Host) = (&self.parked, ended.lease.space)
            && let Storage::Own(block) = std::mem::replace(&mut grant.storage, Storage::Nothing)
        {
            parked.take_over(ended.place, block);
        }
    }

    fn limit(&self, space: Space) -> Option<u64> {
        match space {
            Space::Device => self.limit,
            Space::Host => None,
        }
    }

    fn exceeds_limit(&self, space: Space, bytes: u64) -> bool {
        let needed = self.ledger.live_bytes(space).saturating_add(bytes);
        self.limit(space).is_some_and(|limit| needed > limit)
    }

    /// Counts a lease for [`Memory::refuse_after`].
    fn injects_refusal(&mut self) -> bool {
        let left = self.refuse_after.take();
        self.refuse_after = left.and_then(|leases| leases.checked_sub(1));
        left == Some(0)
    }

    /// The error for a block that the device or the system refused.
    fn refuse_block(&self, lease: Lease, refused: Refused) -> OutOfMemory {
        let cause = match refused.device_bytes {
            None => Cause::Host,
            Some(bytes) if bytes.others_are_in_the_way(lease.bytes) => Cause::OtherProcess,
            Some(_) => Cause::Capacity,
        };
        self.refuse(lease, cause, Some(refused))
    }

    /// Explains a lack of memory outside of leases: [`crate::Memory::shortage`].
    pub(crate) fn shortage(&self, name: &'static str, bytes: u64, refused: Refused) -> OutOfMemory {
        let lease = Lease {
            name,
            category: Category::Temporary,
            place: self.ledger.place(),
            space: Space::Device,
            bytes,
        };
        let mut refusal = self.refuse_block(lease, refused);
        refusal.set_beside(bytes);
        refusal
    }

    fn refuse(&self, lease: Lease, cause: Cause, refused: Option<Refused>) -> OutOfMemory {
        let limit_bytes = match (cause, &refused) {
            (Cause::Capacity, None) => self.limit(lease.space),
            _ => None,
        };
        let (device_bytes, driver_error) = refused.map_or((None, None), |refused| {
            (refused.device_bytes, refused.error)
        });
        let refusal = Refusal {
            device: match lease.space {
                Space::Device => self.backing.name(),
                Space::Host => "Host",
            },
            requested_bytes: lease.bytes,
            name: lease.name,
            category: lease.category,
            place: lease.place,
            space: lease.space,
            live_by_category: self.ledger.live_by_category(),
            live_largest: self.ledger.live_largest(),
            reserved_bytes: if self.slab.capacity() == u64::MAX {
                0
            } else {
                self.slab.capacity()
            },
            limit_bytes,
            device_bytes,
            beside_bytes: 0,
            driver_error,
            cause,
        };
        refusal.into()
    }
}
