//! The history of a memory: every event, as pictures need it.

use crate::{Category, Lease, Place};

/// The events since [`crate::Memory::keep_history`], without those of earlier steps. It has what lives across steps,
/// then the last step, whole or up to its failure. A step's leases end with it, so omitting earlier steps changes
/// nothing that is live.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// In the order in which they happened; times never decrease.
    pub events: Vec<MemoryEvent>,
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryEvent {
    /// Time in seconds, by the clock given to [`crate::Memory::keep_history`].
    pub at_s: f64,
    /// What changed.
    pub change: MemoryChange,
}

/// A change of what is live, or of where the run is. No two live leases have the same number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MemoryChange {
    /// A lease was granted.
    Take {
        /// Identifies the lease among all live ones.
        number: usize,
        /// The lease.
        lease: Lease,
        /// Where its bytes are.
        address: Address,
    },
    /// A lease was given back.
    GiveBack {
        /// Its number.
        number: usize,
    },
    /// A lease got another category.
    Recategorize {
        /// Its number.
        number: usize,
        /// The new category.
        category: Category,
    },
    /// The slab for the leases of steps was reserved.
    ReserveSlab {
        /// Its size.
        bytes: u64,
    },
    /// A phase or a part of the model was entered, or returned to.
    Enter(Place),
    /// A step began.
    BeginStep,
}

/// Where the bytes of a lease are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Address {
    /// In the slab. Before the slab is reserved, where they would be in it.
    Slab {
        /// Bytes from the slab's beginning.
        offset: u64,
    },
    /// In a block of device memory that only this lease has.
    Own,
    /// In a block of pinned host memory.
    Pinned,
}

/// Records events.
pub(crate) struct Recorder {
    clock: Box<dyn Fn() -> f64>,
    before_steps: Vec<MemoryEvent>,
    step: Option<Vec<MemoryEvent>>,
}

impl Recorder {
    pub(crate) fn new(clock: Box<dyn Fn() -> f64>) -> Recorder {
        Recorder {
            clock,
            before_steps: Vec::new(),
            step: None,
        }
    }

    pub(crate) fn note(&mut self, change: MemoryChange) {
        let event = MemoryEvent {
            at_s: (self.clock)(),
            change,
        };
        if change == MemoryChange::BeginStep {
            self.step.get_or_insert_default().clear();
        }
        let events = self.step.as_mut().unwrap_or(&mut self.before_steps);
        events.push(event);
    }

    pub(crate) fn history(&self) -> History {
        let step = self.step.iter().flatten();
        History {
            events: self.before_steps.iter().chain(step).copied().collect(),
        }
    }
}
