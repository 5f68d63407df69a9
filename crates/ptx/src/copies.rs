//! Asynchronous copies that a warp has asked for and not waited for.

use crate::registers::{LANES, LaneMask};

/// A copy that was asked for.
pub(crate) struct AsyncCopy {
    pub(crate) lane: usize,
    /// The number of its lane's group; none before it is committed.
    pub(crate) group: Option<u32>,
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) bytes: usize,
    /// Bytes that are read; the others become zero.
    pub(crate) read_bytes: usize,
}

/// A warp's copies that were not waited for.
#[derive(Default)]
pub(crate) struct AsyncCopies {
    pub(crate) under_way: Vec<AsyncCopy>,
    /// How many groups each lane has committed.
    pub(crate) groups: [u32; LANES],
}

impl AsyncCopies {
    /// Closes a group: what the lane asked for since the last one.
    pub(crate) fn commit(&mut self, lane: usize) {
        let group = Some(self.groups[lane]);
        self.groups[lane] += 1;
        for copy in &mut self.under_way {
            if copy.lane == lane && copy.group.is_none() {
                copy.group = group;
            }
        }
    }

    /// Takes a lane's copies, of whatever group.
    pub(crate) fn take(&mut self, lane: usize) -> Vec<AsyncCopy> {
        self.under_way
            .extract_if(.., |copy| copy.lane == lane)
            .collect()
    }

    /// How many copies of these lanes are under way.
    pub(crate) fn count(&self, mask: LaneMask) -> usize {
        let belongs = |copy: &&AsyncCopy| mask >> copy.lane & 1 == 1;
        self.under_way.iter().filter(belongs).count()
    }
}
