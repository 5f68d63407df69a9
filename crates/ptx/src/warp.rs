//! A warp: its registers, and where its lanes are.

use crate::clock::{COPIES, VectorClock};
use crate::copies::AsyncCopies;
use crate::memory::AddressSpace;
use crate::phase::PhaseWait;
use crate::products::WarpProducts;
use crate::registers::{LANES, LaneMask, Registers, lanes};

/// What a group of lanes waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wait {
    Phase(PhaseWait),
    /// So many more registers for each thread of the warp.
    Registers(u32),
    /// That others have run.
    Turn,
}

/// Lanes that are at the same instruction.
#[derive(Clone, Debug)]
pub(crate) struct LaneGroup {
    /// The instruction that is next.
    pub(crate) at: usize,
    pub(crate) lanes: LaneMask,
    /// Whether it waits here for other lanes of the warp.
    pub(crate) is_waiting: bool,
    /// What it waits for: it goes on after any of these.
    pub(crate) waits: Vec<Wait>,
}

impl LaneGroup {
    /// Lanes that can go on.
    pub(crate) fn new(at: usize, lanes: LaneMask) -> LaneGroup {
        LaneGroup {
            at,
            lanes,
            is_waiting: false,
            waits: Vec::new(),
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        !self.is_waiting && self.waits.is_empty()
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
    /// What all its lanes know to precede their accesses.
    pub(crate) clock: VectorClock,
    /// By lane, what precedes its accesses, if that is more: it waited, or fenced, without the others.
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
                earlier.waits.clear();
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
        self.clock = self.release(self.whole);
        self.ahead.fill(None);
        self.met = self.time;
    }

    /// What precedes those who learn that the lanes of a mask came here: what these know, their accesses, and the copies that they
    /// waited for.
    pub(crate) fn release(&mut self, mask: LaneMask) -> VectorClock {
        let mut clock = self.clock.clone();
        for ahead in lanes(mask).filter_map(|lane| self.ahead[lane].as_ref()) {
            clock.join(ahead);
        }
        self.time += 1;
        clock
            .seen
            .raise(self.index, &self.times(mask, [self.time; LANES]));
        if self.copies.time > 0 {
            let copied = self.times(mask, self.copies.over);
            clock.seen.raise(COPIES + self.index, &copied);
        }
        clock
    }

    /// Times of the lanes of a mask, and none of the others, for [`crate::clock::Times::raise`].
    pub(crate) fn times(&self, mask: LaneMask, times: [u32; LANES]) -> [u32; LANES] {
        std::array::from_fn(|lane| match (mask >> lane & 1, self.whole >> lane & 1) {
            (1, _) => times[lane],
            (_, 1) => 0,
            _ => u32::MAX,
        })
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

    /// Tensor cores see what the lanes of a mask wrote, and what they know of, where these lanes know of the fence.
    pub(crate) fn fence(&mut self, mask: LaneMask) {
        if mask == self.whole {
            let clock = self.release(mask);
            let ahead = self.ahead.iter_mut().flatten();
            for known in ahead.chain([&mut self.clock]) {
                known.fenced.join(&clock.seen);
            }
            return;
        }
        for lane in lanes(mask) {
            let mut clock = self.release(1 << lane);
            clock.fenced.join(&clock.seen);
            self.ahead[lane] = Some(clock);
        }
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
