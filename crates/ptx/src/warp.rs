//! A warp: its registers, and where its lanes are.

use crate::copies::AsyncCopies;
use crate::memory::AddressSpace;
use crate::registers::{LaneMask, Registers};

/// Lanes that are at the same instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaneGroup {
    /// The instruction that is next.
    pub(crate) at: usize,
    pub(crate) lanes: LaneMask,
    /// Whether it waits here for other lanes of the warp.
    pub(crate) is_waiting: bool,
}

/// A warp at a barrier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Arrival {
    pub(crate) number: u32,
    /// How many threads the barrier waits for.
    pub(crate) threads: u32,
    /// Whether the barrier's condition holds in any lane, if it has one.
    pub(crate) any: Option<bool>,
}

/// A warp of the block that runs.
pub(crate) struct Warp {
    /// Its number in the block.
    pub(crate) index: usize,
    pub(crate) registers: Registers,
    /// The lanes that it began with.
    pub(crate) whole: LaneMask,
    /// Its lanes that have not ended.
    pub(crate) groups: Vec<LaneGroup>,
    pub(crate) arrival: Option<Arrival>,
    pub(crate) copies: AsyncCopies,
    /// Local memory, by lane.
    pub(crate) local: Vec<AddressSpace>,
    /// The time of its clock.
    pub(crate) time: u32,
    /// For each warp of the block, the time of its clock before which its accesses precede those of this one.
    pub(crate) seen: Vec<u32>,
}

impl Warp {
    /// Merges groups at the same instruction; a waiting group is checked again.
    pub(crate) fn merge(&mut self) {
        if self.groups.len() < 2 {
            return;
        }
        self.groups.sort_by_key(|group| group.at);
        self.groups.dedup_by(|later, earlier| {
            let is_same = later.at == earlier.at;
            if is_same {
                earlier.lanes |= later.lanes;
                earlier.is_waiting = false;
            }
            is_same
        });
    }

    /// Makes the accesses of all lanes visible to the whole warp.
    pub(crate) fn synchronise(&mut self) {
        self.time += 1;
        self.seen[self.index] = self.time;
    }

    /// Orders earlier reads of the whole warp before its later writes.
    pub(crate) fn exchange(&mut self, mask: LaneMask) {
        self.time += u32::from(mask == self.whole);
    }

    /// The lanes that have not ended.
    pub(crate) fn running(&self) -> LaneMask {
        self.groups
            .iter()
            .fold(0, |running, group| running | group.lanes)
    }
}
