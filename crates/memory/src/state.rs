//! What is leased, and what stands behind it.

use crate::clock::PhaseClock;
use crate::host::HostBlock;
use crate::ledger::{Lease, Ledger};
use crate::{Category, Cause, DType, Dims, OutOfMemory, Refusal, Slab, Space, round_up};

/// The state that all clones of a [`crate::Memory`] share.
pub(crate) struct State {
    pub(crate) ledger: Ledger,
    pub(crate) slab: Slab,
    pub(crate) backing: Backing,
    pub(crate) limit: Option<u64>,
    pub(crate) pinned_limit: Option<u64>,
    /// Leases to grant before one is refused, for tests.
    pub(crate) refuse_after: Option<usize>,
    pub(crate) poison: bool,
    pub(crate) clock: PhaseClock,
}

/// What stands behind a lease.
pub(crate) enum Backing {
    /// Host memory; once a slab is reserved, leases of a step lie in it.
    Host { slab: Option<HostBlock> },
    /// Nothing: shapes only.
    Shapes,
}

/// Where a lease lives.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Home {
    /// In the slab, within a step.
    Slab,
    /// Alone in device memory, across steps.
    Own,
    /// Alone in pinned host memory, across steps.
    Pinned,
}

impl Home {
    fn space(self) -> Space {
        match self {
            Home::Slab | Home::Own => Space::Device,
            Home::Pinned => Space::Host,
        }
    }
}

/// Where the physical bytes of a lease are, and how they are given back.
pub(crate) enum Storage {
    /// A range of the slab.
    Slab,
    /// A block of its own, freed with the lease.
    Own { _block: HostBlock },
    /// None: shapes only.
    Nothing,
}

/// A granted lease.
pub(crate) struct Grant {
    pub(crate) number: usize,
    /// Offset in the slab; none for what lives across steps.
    offset: Option<u64>,
    pub(crate) bytes: u64,
    pub(crate) storage: Storage,
}

impl State {
    pub(crate) fn new(backing: Backing) -> State {
        State {
            ledger: Ledger::default(),
            slab: Slab::new(u64::MAX),
            backing,
            limit: None,
            pinned_limit: None,
            refuse_after: None,
            poison: false,
            clock: PhaseClock::new(),
        }
    }

    /// Grants a lease: records it, places it, and finds its memory. Returns what gives it back and its address.
    pub(crate) fn take(
        &mut self,
        category: Category,
        name: &'static str,
        dims: Dims,
        dtype: DType,
        home: Home,
    ) -> Result<(Grant, *mut u8), OutOfMemory> {
        let space = home.space();
        let bytes = dims.bytes(dtype).map_or(u64::MAX, round_up);
        let lease = Lease {
            name,
            category,
            place: self.ledger.place(),
            space,
            bytes,
        };
        if bytes == u64::MAX {
            return Err(self.refuse(lease, Cause::Host));
        }
        if self.injects_refusal() || self.exceeds_limit(space, bytes) {
            return Err(self.refuse(lease, Cause::Capacity));
        }
        let offset = match home {
            Home::Slab => match self.slab.place(bytes) {
                Some(offset) => Some(offset),
                None => return Err(self.refuse(lease, Cause::Fragmentation)),
            },
            Home::Own | Home::Pinned => None,
        };
        let (storage, pointer) = match (&self.backing, offset) {
            (Backing::Shapes, _) => (Storage::Nothing, std::ptr::null_mut()),
            (Backing::Host { slab: Some(slab) }, Some(offset)) => {
                (Storage::Slab, slab.pointer().wrapping_add(offset as usize))
            }
            (Backing::Host { .. }, _) => match HostBlock::new(bytes) {
                Some(block) => {
                    let pointer = block.pointer();
                    (Storage::Own { _block: block }, pointer)
                }
                None => {
                    if let Some(offset) = offset {
                        self.slab.free(offset, bytes);
                    }
                    return Err(self.refuse(lease, Cause::Host));
                }
            },
        };
        if self.poison && home == Home::Slab && !pointer.is_null() {
            // SAFETY: `pointer` starts `bytes` of memory that no live lease shares.
            unsafe { std::ptr::write_bytes(pointer, 0xff, bytes as usize) };
        }
        let number = self.ledger.take(lease);
        let grant = Grant {
            number,
            offset,
            bytes,
            storage,
        };
        Ok((grant, pointer))
    }

    /// Takes a lease back.
    pub(crate) fn give_back(&mut self, grant: &Grant) {
        self.ledger.give_back(grant.number);
        if let Some(offset) = grant.offset {
            self.slab.free(offset, grant.bytes);
        }
    }

    fn limit(&self, space: Space) -> Option<u64> {
        match space {
            Space::Device => self.limit,
            Space::Host => self.pinned_limit,
        }
    }

    fn exceeds_limit(&self, space: Space, bytes: u64) -> bool {
        let needed = self.ledger.live_bytes(space).saturating_add(bytes);
        self.limit(space).is_some_and(|limit| needed > limit)
    }

    /// Counts a lease towards [`Memory::refuse_after`].
    fn injects_refusal(&mut self) -> bool {
        let left = self.refuse_after.take();
        self.refuse_after = left.and_then(|leases| leases.checked_sub(1));
        left == Some(0)
    }

    pub(crate) fn refuse(&self, lease: Lease, cause: Cause) -> OutOfMemory {
        let refusal = Refusal {
            device: "CPU",
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
            limit_bytes: match cause {
                Cause::Capacity => self.limit(lease.space),
                Cause::Fragmentation | Cause::Host => None,
            },
            cause,
        };
        refusal.into()
    }
}
