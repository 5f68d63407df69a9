//! Asynchronous copies that a warp has asked for and not waited for.

use crate::registers::{LANES, LaneMask};
use std::cell::Cell;
use std::rc::Rc;

/// A copy that was asked for.
pub(crate) struct AsyncCopy {
    pub(crate) lane: usize,
    /// When it was asked for, by the clock of the warp's copies.
    pub(crate) time: u32,
    /// The number of its lane's group; none before it is committed.
    pub(crate) group: Cell<Option<u32>>,
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) bytes: usize,
    /// Bytes that are read; the others become zero.
    pub(crate) read_bytes: usize,
    pub(crate) is_made: Cell<bool>,
    /// Whether its thread has arrived with it on a barrier in memory.
    pub(crate) is_awaited: Cell<bool>,
    /// Whether somebody has waited for it.
    pub(crate) is_over: Cell<bool>,
}

/// A warp's copies that were not waited for.
#[derive(Default)]
pub(crate) struct AsyncCopies {
    pub(crate) under_way: Vec<Rc<AsyncCopy>>,
    /// How many groups each lane has committed.
    pub(crate) groups: [u32; LANES],
    /// The time of the clock of the warp's copies.
    pub(crate) time: u32,
    /// Before that time, each lane has waited for its copies.
    pub(crate) over: [u32; LANES],
}

impl AsyncCopies {
    fn of(&self, lane: usize) -> impl Iterator<Item = &Rc<AsyncCopy>> {
        self.under_way.iter().filter(move |copy| copy.lane == lane)
    }

    /// Closes a group: what the lane asked for since the last one.
    pub(crate) fn commit(&mut self, lane: usize) {
        let group = self.groups[lane];
        self.groups[lane] += 1;
        for copy in self.of(lane) {
            copy.group.set(copy.group.get().or(Some(group)));
        }
    }

    /// The lanes of a mask wait for all their groups except the `newest`. Gives the copies of these.
    pub(crate) fn wait(&mut self, mask: LaneMask, newest: u32) -> Vec<Rc<AsyncCopy>> {
        let groups = self.groups;
        let is_due = |copy: &mut Rc<AsyncCopy>| {
            let is_old = |group| group + newest < groups[copy.lane];
            mask >> copy.lane & 1 == 1 && copy.group.get().is_some_and(is_old)
        };
        let due = self.under_way.extract_if(.., is_due).collect();
        let mut over = [self.time; LANES];
        for copy in &self.under_way {
            over[copy.lane] = over[copy.lane].min(copy.time);
        }
        for lane in crate::registers::lanes(mask) {
            self.over[lane] = over[lane];
        }
        due
    }

    /// A lane arrives on a barrier in memory when its copies are made. Gives those for which nobody has waited yet.
    pub(crate) fn awaited(&mut self, lane: usize) -> Vec<Rc<AsyncCopy>> {
        self.under_way.retain(|copy| !copy.is_over.get());
        let copies: Vec<Rc<AsyncCopy>> = self.of(lane).cloned().collect();
        copies.iter().for_each(|copy| copy.is_awaited.set(true));
        copies
    }

    /// How many copies of these lanes nobody will have waited for if they end.
    pub(crate) fn count(&self, mask: LaneMask) -> usize {
        let is_lost = |copy: &&Rc<AsyncCopy>| mask >> copy.lane & 1 == 1 && !copy.is_awaited.get();
        self.under_way.iter().filter(is_lost).count()
    }
}
