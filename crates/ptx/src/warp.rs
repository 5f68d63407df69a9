//! A warp: its registers, and where its lanes are.

use crate::clock::{VectorClock, later};
use crate::copies::AsyncCopies;
use crate::memory::AddressSpace;
use crate::phase::PhaseWait;
use crate::products::WarpProducts;
use crate::registers::{LaneMask, Registers, lanes};

/// Lanes that are at the same instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaneGroup {
    /// The instruction that is next.
    pub(crate) at: usize,
    pub(crate) lanes: LaneMask,
    /// Whether it waits here for other lanes of the warp.
    pub(crate) is_waiting: bool,
    /// The phase that it waits for.
    pub(crate) phase: Option<PhaseWait>,
}

impl LaneGroup {
    /// Lanes that can go on.
    pub(crate) fn new(at: usize, lanes: LaneMask) -> LaneGroup {
        LaneGroup {
            at,
            lanes,
            is_waiting: false,
            phase: None,
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        !self.is_waiting && self.phase.is_none()
    }
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
    /// Products, if the kernel has any.
    pub(crate) products: Option<WarpProducts>,
    /// Local memory, by lane.
    pub(crate) local: Vec<AddressSpace>,
    /// The time of its clock.
    pub(crate) time: u32,
    /// The time when its lanes last gave each other what they had read.
    pub(crate) met: u32,
    /// What precedes the accesses of all its lanes.
    pub(crate) clock: VectorClock,
    /// By lane, what precedes its accesses, if it waited for more than the others did.
    pub(crate) ahead: Vec<Option<VectorClock>>,
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
                earlier.phase = None;
            }
            is_same
        });
    }

    /// What precedes the accesses of a lane.
    pub(crate) fn clock_of(&self, lane: usize) -> &VectorClock {
        self.ahead[lane].as_ref().unwrap_or(&self.clock)
    }

    /// Makes the accesses of all lanes visible to the whole warp, and what any of them knows.
    pub(crate) fn synchronise(&mut self) {
        for ahead in self.ahead.iter_mut().filter_map(Option::take) {
            self.clock.join(&ahead);
        }
        self.time += 1;
        self.met = self.time;
        self.clock.seen[self.index] = self.time;
    }

    /// What precedes those who learn that the lanes of a mask came here. Of single lanes these are the accesses before the
    /// warp last met, of all lanes those until now.
    pub(crate) fn release(&mut self, mask: LaneMask) -> VectorClock {
        let mut clock = self.clock.clone();
        for lane in lanes(mask) {
            if let Some(ahead) = &self.ahead[lane] {
                clock.join(ahead);
            }
        }
        if mask == self.whole {
            self.time += 1;
            clock.seen[self.index] = self.time;
        }
        clock
    }

    /// The lanes of a mask learn what others released.
    pub(crate) fn acquire(&mut self, mask: LaneMask, clock: &VectorClock) {
        if mask == self.whole {
            self.clock.join(clock);
        }
        for lane in lanes(mask) {
            match &mut self.ahead[lane] {
                Some(ahead) => ahead.join(clock),
                None if mask == self.whole => {}
                None => {
                    let mut ahead = self.clock.clone();
                    ahead.join(clock);
                    self.ahead[lane] = Some(ahead);
                }
            }
        }
    }

    /// Tensor cores see what precedes a proxy fence of the lanes of a mask.
    pub(crate) fn fence(&mut self, mask: LaneMask) {
        if mask == 0 {
            return;
        }
        let mut clock = self.release(mask);
        clock.fence();
        later(&mut self.clock.fenced, &clock.fenced);
    }

    /// Orders earlier reads of the whole warp before its later writes.
    pub(crate) fn exchange(&mut self, mask: LaneMask) {
        if mask == self.whole {
            self.time += 1;
            self.met = self.time;
        }
    }

    /// The lanes that have not ended.
    pub(crate) fn running(&self) -> LaneMask {
        self.groups
            .iter()
            .fold(0, |running, group| running | group.lanes)
    }
}
