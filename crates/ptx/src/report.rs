//! Counts of a launch: its instructions, and the cost of its accesses.

use crate::registers::{LANES, LaneMask, lanes};
use std::collections::BTreeSet;

/// Bytes that global memory moves at a time.
const SECTOR_BYTES: u64 = 32;
/// Banks of shared memory, and the bytes of each.
const BANKS: usize = 32;
const BANK_BYTES: u64 = 4;

/// Counts of a launch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Instructions, counted once for each thread that took part.
    pub instructions: u64,
    /// The opcodes that some thread executed.
    pub opcodes: BTreeSet<&'static str>,
    /// Every line that accessed global or shared memory, in the order of the text.
    pub lines: Vec<LineCounts>,
}

/// The accesses of one instruction of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineCounts {
    /// The line, from 1.
    pub line: u32,
    /// The cost of its accesses.
    pub counts: AccessCounts,
}

/// The cost of the accesses of warps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessCounts {
    /// Accesses of warps to global memory.
    pub global: u64,
    /// Sectors of 32 bytes that these touch, each access by itself.
    pub sectors: u64,
    /// Accesses of warps to shared memory.
    pub shared: u64,
    /// Rounds that these take: in one, every bank gives a word. 8 bytes a lane go by half warps, 16 by quarters.
    pub rounds: u64,
    /// Rounds above those that as many lanes take without conflicts between banks.
    pub conflicts: u64,
}

impl AccessCounts {
    pub(crate) fn count_global(&mut self, addresses: &[u64; LANES], mask: LaneMask, bytes: usize) {
        let mut sectors = [0; LANES];
        let mut count = 0;
        for lane in lanes(mask) {
            let sector = addresses[lane] / SECTOR_BYTES;
            if count == 0 || sectors[count - 1] != sector {
                sectors[count] = sector;
                count += 1;
            }
        }
        self.global += u64::from(mask != 0);
        self.sectors += distinct(&mut sectors[..count]) * (bytes as u64).div_ceil(SECTOR_BYTES);
    }

    pub(crate) fn count_shared(&mut self, addresses: &[u64; LANES], mask: LaneMask, bytes: usize) {
        self.shared += u64::from(mask != 0);
        let words = (bytes as u64).div_ceil(BANK_BYTES) as usize;
        let lanes_at_a_time = LANES / words;
        for first in (0..LANES).step_by(lanes_at_a_time) {
            let mut starts = [0; LANES];
            let mut count = 0;
            let lanes = addresses.iter().enumerate().skip(first);
            for (lane, address) in lanes.take(lanes_at_a_time) {
                if mask >> lane & 1 == 1 {
                    starts[count] = address / BANK_BYTES;
                    count += 1;
                }
            }
            let rounds = rounds(&mut starts[..count], words);
            self.rounds += rounds;
            self.conflicts += rounds.saturating_sub(1);
        }
    }
}

/// Rounds for accesses of some words each.
fn rounds(starts: &mut [u64], words: usize) -> u64 {
    distinct(starts);
    let mut of_bank = [0; BANKS];
    let mut before = None;
    for start in starts.iter().copied() {
        if before.replace(start) != Some(start) {
            for word in start..start + words as u64 {
                of_bank[word as usize % BANKS] += 1;
            }
        }
    }
    of_bank.into_iter().max().unwrap_or(0)
}

/// Sorts, and counts what differs.
fn distinct(values: &mut [u64]) -> u64 {
    if !values.is_sorted() {
        values.sort_unstable();
    }
    let changes = values.windows(2).filter(|pair| pair[0] != pair[1]);
    changes.count() as u64 + u64::from(!values.is_empty())
}
