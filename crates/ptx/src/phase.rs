//! Barriers in shared memory: the phases of each, what they still wait for, and whom they order.

use crate::clock::VectorClock;
use crate::copies::AsyncCopy;
use crate::error::{MistakeKind, Wrong, refuse};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Bytes of a barrier.
pub(crate) const BYTES: usize = 8;

/// A phase of a barrier that has to be over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PhaseWait {
    pub(crate) address: u64,
    pub(crate) parity: bool,
}

/// A copy that is made when a phase ends. Until then its target counts as unwritten.
pub(crate) struct LateCopy {
    pub(crate) copy: Rc<AsyncCopy>,
    /// The warp, and its instruction, that arrived with it.
    pub(crate) warp: usize,
    pub(crate) at: usize,
}

/// Arrivals, and what comes with them.
pub(crate) struct PhaseArrival {
    pub(crate) count: u32,
    /// Further bytes that the phase waits for.
    pub(crate) bytes: u64,
    pub(crate) clock: VectorClock,
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
    /// The copies of the current phase, and those of others, for which nobody has waited.
    copies: Vec<LateCopy>,
    made: Vec<LateCopy>,
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
            made: Vec::new(),
        }
    }

    fn is_over(&self, parity: bool) -> bool {
        parity != (self.phases % 2 == 1)
    }

    /// Somebody waits for the phase of a parity. Gives what precedes its end; nothing if it is not over.
    pub(crate) fn wait(&mut self, parity: bool) -> Option<&VectorClock> {
        if !self.is_over(parity) {
            return None;
        }
        for late in self.made.drain(..) {
            late.copy.is_over.set(true);
        }
        Some(&self.over)
    }

    /// Says how many arrivals and bytes the current phase lacks.
    fn lack(&self, address: u64) -> String {
        format!(
            "phase {} of the barrier at {address:#x} lacks {} of {} arrivals and {} bytes",
            self.phases, self.missing, self.expected, self.bytes
        )
    }

    /// Errors, with a warp and its instruction, if nobody has waited for some copy.
    fn check_copies(&self, address: u64) -> Result<(), (usize, usize, Wrong)> {
        let is_lost = |late: &&LateCopy| !late.copy.is_over.get();
        let (late, why) = match (
            self.copies.iter().find(is_lost),
            self.made.iter().find(is_lost),
        ) {
            (Some(late), _) => (late, self.lack(address)),
            (_, Some(late)) => (
                late,
                format!("nobody waits for the barrier at {address:#x}"),
            ),
            _ => return Ok(()),
        };
        let message = format!("ended with an asynchronous copy that was not waited for: {why}");
        let wrong = Wrong::new(MistakeKind::Unfinished, message);
        Err((late.warp, late.at, wrong))
    }
}

/// The barriers of a block, by their addresses.
#[derive(Default)]
pub(crate) struct Mbarriers(pub(crate) BTreeMap<u64, Mbarrier>);

impl Mbarriers {
    /// Whether nobody has to wait any longer.
    pub(crate) fn is_over(&self, wait: PhaseWait) -> bool {
        let barrier = self.0.get(&wait.address);
        barrier.is_none_or(|barrier| barrier.is_over(wait.parity))
    }

    /// Errors if there is a barrier where somebody writes.
    #[inline]
    pub(crate) fn check_write(&self, address: u64, bytes: usize) -> Result<(), Wrong> {
        if self.0.is_empty() {
            return Ok(());
        }
        let first = address.saturating_sub(BYTES as u64 - 1);
        match self.0.range(first..address + bytes as u64).next() {
            None => Ok(()),
            Some((at, _)) => {
                let message = format!("the barrier at {at:#x} is overwritten");
                refuse(MistakeKind::Barrier, message)
            }
        }
    }

    /// Takes a barrier out of use.
    pub(crate) fn remove(&mut self, address: u64) -> Result<(), Wrong> {
        let barrier = self.0.remove(&address);
        let barrier = barrier.expect("its use has been checked");
        let checked = barrier.check_copies(address);
        checked.map_err(|(_, _, wrong)| wrong)
    }

    /// Errors, with a warp and its instruction, if nobody has waited for some copy when the block ends.
    pub(crate) fn check_end(&self) -> Result<(), (usize, usize, Wrong)> {
        let mut barriers = self.0.iter();
        barriers.try_for_each(|(address, barrier)| barrier.check_copies(*address))
    }

    /// How many arrivals the phase of a barrier lacks.
    pub(crate) fn missing(&self, address: u64) -> u32 {
        self.0[&address].missing
    }

    /// Arrives on a barrier. Gives how many phases were over before, and whether one more is now.
    pub(crate) fn arrive(
        &mut self,
        address: u64,
        arrival: PhaseArrival,
    ) -> Result<(u32, bool), Wrong> {
        let barrier = self.0.get_mut(&address);
        let barrier = barrier.expect("its use has been checked");
        if arrival.count > barrier.missing {
            let (count, lack) = (arrival.count, barrier.lack(address));
            let message = format!("{count} arrivals on a barrier: {lack}");
            return refuse(MistakeKind::Barrier, message);
        }
        let before = barrier.phases;
        barrier.missing -= arrival.count;
        barrier.bytes += arrival.bytes;
        barrier.arriving.join(&arrival.clock);
        barrier.copies.extend(arrival.copies);
        if barrier.missing > 0 || barrier.bytes > 0 {
            return Ok((before, false));
        }
        barrier.phases += 1;
        barrier.missing = barrier.expected;
        barrier.over = std::mem::take(&mut barrier.arriving);
        barrier.made.append(&mut barrier.copies);
        Ok((before, true))
    }

    /// The copies that are made by the ends of a barrier's phases.
    pub(crate) fn made(&self, address: u64) -> impl Iterator<Item = &Rc<AsyncCopy>> {
        self.0[&address].made.iter().map(|late| &late.copy)
    }

    /// Nobody can go on, and these are the barriers for which somebody waits.
    pub(crate) fn stuck(&self, waits: &BTreeSet<u64>) -> Wrong {
        let lacks = waits.iter().map(|at| self.0[at].lack(*at));
        let lacks: Vec<String> = lacks.collect();
        let message = format!("a wait for ever: {}", lacks.join(", "));
        Wrong::new(MistakeKind::Barrier, message)
    }
}
