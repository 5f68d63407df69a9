//! Barriers in shared memory: the phases of each, what they still wait for, and whom they order.

use crate::clock::VectorClock;
use crate::copies::AsyncCopy;
use crate::error::{MistakeKind, Wrong};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// What a group of lanes waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PhaseWait {
    pub(crate) address: u64,
    /// The parity of the phase that has to be over.
    pub(crate) parity: bool,
}

/// A thread's copy that is made when the phase ends on which it arrives. Until then its target counts as unwritten.
pub(crate) struct LateCopy {
    pub(crate) copy: AsyncCopy,
    pub(crate) thread: usize,
    pub(crate) time: u32,
    pub(crate) met: u32,
    pub(crate) clock: Rc<VectorClock>,
}

/// Arrivals, and what comes with them.
pub(crate) struct PhaseArrival {
    pub(crate) count: u32,
    /// Further bytes that the phase waits for.
    pub(crate) bytes: u64,
    pub(crate) clock: Rc<VectorClock>,
    pub(crate) copies: Vec<LateCopy>,
}

/// A barrier in shared memory.
pub(crate) struct Mbarrier {
    /// Arrivals that end a phase.
    expected: u32,
    /// Those that the current phase lacks.
    missing: u32,
    /// Bytes that it lacks.
    bytes: u64,
    /// How many phases are over.
    phases: u32,
    /// What precedes the arrivals of the current phase, and those of the one before.
    arriving: VectorClock,
    over: VectorClock,
    copies: Vec<LateCopy>,
}

impl Mbarrier {
    pub(crate) fn new(expected: u32) -> Mbarrier {
        Mbarrier {
            expected,
            missing: expected,
            bytes: 0,
            phases: 0,
            arriving: VectorClock::default(),
            over: VectorClock::default(),
            copies: Vec::new(),
        }
    }

    /// What precedes those who find the phase of a parity over; nothing if it is not.
    pub(crate) fn over(&self, parity: bool) -> Option<&VectorClock> {
        (parity != (self.phases % 2 == 1)).then_some(&self.over)
    }
}

/// The barriers of a block, by their addresses.
#[derive(Default)]
pub(crate) struct Mbarriers(pub(crate) BTreeMap<u64, Mbarrier>);

impl Mbarriers {
    /// Whether nobody has to wait any longer.
    pub(crate) fn is_over(&self, wait: PhaseWait) -> bool {
        let barrier = self.0.get(&wait.address);
        barrier.is_none_or(|barrier| barrier.over(wait.parity).is_some())
    }

    /// Arrives on a barrier. Gives how many phases were over before, and the copies of the phase if it is over now.
    pub(crate) fn arrive(
        &mut self,
        address: u64,
        arrival: PhaseArrival,
    ) -> Result<(u32, Vec<LateCopy>), Wrong> {
        let barrier = self.0.get_mut(&address);
        let barrier = barrier.expect("its use has been checked");
        if arrival.count > barrier.missing {
            let message = format!(
                "{} arrivals at the barrier at {address:#x}, whose phase {} lacks {} of {}, and {} bytes",
                arrival.count, barrier.phases, barrier.missing, barrier.expected, barrier.bytes
            );
            return Err(Wrong::new(MistakeKind::Barrier, message));
        }
        let before = barrier.phases;
        barrier.missing -= arrival.count;
        barrier.bytes += arrival.bytes;
        barrier.arriving.join(&arrival.clock);
        barrier.copies.extend(arrival.copies);
        if barrier.missing > 0 || barrier.bytes > 0 {
            return Ok((before, Vec::new()));
        }
        barrier.phases += 1;
        barrier.missing = barrier.expected;
        barrier.over = std::mem::take(&mut barrier.arriving);
        Ok((before, std::mem::take(&mut barrier.copies)))
    }

    /// Nobody can go on, and these are the barriers for which somebody waits.
    pub(crate) fn stuck(&self, waits: &BTreeSet<u64>) -> Wrong {
        let lacks = waits.iter().map(|address| {
            let barrier = &self.0[address];
            format!(
                "phase {} of the barrier at {address:#x} lacks {} of {} arrivals and {} bytes",
                barrier.phases, barrier.missing, barrier.expected, barrier.bytes
            )
        });
        let lacks: Vec<String> = lacks.collect();
        let message = format!("a wait for ever: {}", lacks.join(", "));
        Wrong::new(MistakeKind::Barrier, message)
    }
}
