//! Vector clocks: which accesses of other warps come before one's own.

/// For each warp of the block, a time of its clock.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct VectorClock {
    /// Accesses before that time precede.
    pub(crate) seen: Vec<u32>,
    /// Of these, writes before that time are visible to tensor cores, since a proxy fence came between.
    pub(crate) fenced: Vec<u32>,
}

impl VectorClock {
    pub(crate) fn new(warps: usize) -> VectorClock {
        VectorClock {
            seen: vec![0; warps],
            fenced: vec![0; warps],
        }
    }

    /// Whatever precedes the other precedes this too.
    pub(crate) fn join(&mut self, other: &VectorClock) {
        later(&mut self.seen, &other.seen);
        later(&mut self.fenced, &other.fenced);
    }

    /// A proxy fence after everything that is seen.
    pub(crate) fn fence(&mut self) {
        later(&mut self.fenced, &self.seen);
    }
}

/// Takes the later of each time.
pub(crate) fn later(times: &mut Vec<u32>, others: &[u32]) {
    times.resize(times.len().max(others.len()), 0);
    for (time, other) in times.iter_mut().zip(others) {
        *time = (*time).max(*other);
    }
}
