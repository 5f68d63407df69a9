//! What happened to memory, event by event: what pictures of it are drawn from.

use crate::{Category, Lease, Place};

/// The events since [`crate::Memory::keep_history`], but of the steps only the last: what lives across steps, then one
/// step, whole or up to where it failed. No lease of a step outlives it, so what was left out changes nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// In the order in which they happened; times never fall.
    pub events: Vec<MemoryEvent>,
}

/// Something happened.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryEvent {
    /// Seconds, by the clock that [`crate::Memory::keep_history`] was given.
    pub at_s: f64,
    /// What.
    pub change: MemoryChange,
}

/// A change of what is live, or of where the run is. A lease's number is its own until it is given back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MemoryChange {
    /// A lease was granted.
    Take {
        /// Tells it from all that are live.
        number: usize,
        /// What it is.
        lease: Lease,
        /// Where its bytes are.
        address: Address,
    },
    /// A lease was given back.
    GiveBack {
        /// Its number.
        number: usize,
    },
    /// A lease is for something else from now on.
    Recategorize {
        /// Its number.
        number: usize,
        /// What it is for.
        category: Category,
    },
    /// The range of addresses for the leases of steps was reserved.
    ReserveSlab {
        /// Its size.
        bytes: u64,
    },
    /// A phase, or a part of the model, began or was returned to.
    Enter(Place),
    /// A step began.
    BeginStep,
}

/// Where the bytes of a lease are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Address {
    /// In the slab, or, before that is reserved, where they would be in it.
    Slab {
        /// Bytes from the slab's beginning.
        offset: u64,
    },
    /// In a block of device memory of its own.
    Own,
    /// In a block of pinned host memory.
    Pinned,
}

/// Keeps a history.
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
