//! Vector clocks: which accesses come before one's own.
//!
//! A clock counts on lines: warp `w` has line `w` for its threads, `COPIES + w` for their asynchronous copies and
//! `PRODUCTS + w` for its products, which all go on beside each other.

use crate::registers::LANES;
use std::collections::BTreeMap;

pub(crate) const COPIES: usize = 32;
pub(crate) const PRODUCTS: usize = 64;

/// For each line, the time before which its accesses precede.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Times {
    lines: Vec<u32>,
    /// Where some lanes of a line are ahead of it, the time of each lane.
    lanes: BTreeMap<usize, [u32; LANES]>,
}

impl Times {
    #[inline]
    pub(crate) fn of_line(&self, line: usize) -> u32 {
        self.lines.get(line).copied().unwrap_or(0)
    }

    /// The time of a lane that is ahead of its line, or 0.
    pub(crate) fn of_lane(&self, line: usize, lane: usize) -> u32 {
        self.lanes.get(&line).map_or(0, |times| times[lane])
    }

    /// Takes the later time for a line.
    pub(crate) fn raise_line(&mut self, line: usize, time: u32) {
        if self.lines.len() <= line {
            self.lines.resize(line + 1, 0);
        }
        self.lines[line] = self.lines[line].max(time);
    }

    /// Takes the later times for the lanes of a line. A lane that a warp lacks has the latest time there is.
    pub(crate) fn raise(&mut self, line: usize, others: &[u32; LANES]) {
        let mut times = self.lanes.remove(&line).unwrap_or_default();
        for (time, other) in times.iter_mut().zip(others) {
            *time = (*time).max(*other);
        }
        let least = times.into_iter().min().expect("a warp has lanes");
        self.raise_line(line, least);
        let least = self.of_line(line);
        if times.iter().any(|time| *time > least && *time != u32::MAX) {
            self.lanes.insert(line, times);
        }
    }

    /// Takes the later of all times.
    pub(crate) fn join(&mut self, other: &Times) {
        for (line, time) in other.lines.iter().enumerate() {
            self.raise_line(line, *time);
        }
        for (line, times) in &other.lanes {
            self.raise(*line, times);
        }
    }
}

/// The accesses that precede one: all before these times.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct VectorClock {
    /// Accesses before these times precede.
    pub(crate) seen: Times,
    /// Writes before these times are visible to tensor cores, since a proxy fence came after them.
    pub(crate) fenced: Times,
}

impl VectorClock {
    /// Whatever precedes the other precedes this too.
    pub(crate) fn join(&mut self, other: &VectorClock) {
        self.seen.join(&other.seen);
        self.fenced.join(&other.fenced);
    }
}
