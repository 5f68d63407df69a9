//! A peak of memory, with what was live at it.

use serde::Serialize;
use std::collections::BTreeMap;

/// The most memory that was live at once on one device.
#[derive(Clone, Debug, Serialize)]
pub struct RecordedPeak {
    /// The device's number.
    pub device: u32,
    /// Live bytes.
    pub peak_bytes: u64,
    /// When that was, in words.
    pub at: String,
    /// How it was counted, in words.
    pub counted: String,
    /// Whether memory was recorded over time. If not, these are the bytes that were live when the snapshot was taken.
    pub is_recorded: bool,
    /// Of the live bytes, those that had been freed and waited for the work of another stream.
    pub waiting_bytes: u64,
    /// Live bytes by category; `unknown` where none is recorded.
    pub by_category: BTreeMap<String, u64>,
    /// The live groups, largest first; empty if only categories are recorded.
    pub live: Vec<LiveGroup>,
    /// The bytes that the allocator had reserved for it, where that is recorded.
    pub reserved: Option<ReservedMemory>,
}

/// The allocations of one line of code, or under one name, that were live at a peak.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LiveGroup {
    /// The file and the function, or a tensor's name and place.
    pub place: String,
    /// The line in the file; none of what has no line.
    pub line: Option<u32>,
    /// Its category; `unknown` where that is not recorded.
    pub category: String,
    /// Bytes.
    pub bytes: u64,
    /// Allocations.
    pub count: u64,
}

/// Memory that an allocator had from the driver. What is free in it is counted when the snapshot was taken, since what
/// lay where at the peak is not recorded.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ReservedMemory {
    /// Reserved bytes at the peak of what was live.
    pub at_peak_bytes: u64,
    /// The most that was reserved.
    pub peak_bytes: u64,
    /// Reserved bytes at the end.
    pub end_bytes: u64,
    /// Segments at the end.
    pub segments: u64,
    /// Of the end's bytes, those that were asked for and live.
    pub live_bytes: u64,
    /// Of the end's bytes, those by which live blocks are larger than what was asked for.
    pub rounding_bytes: u64,
    /// Of the end's bytes, those between live blocks.
    pub free_bytes: u64,
    /// The largest free block.
    pub largest_free_bytes: u64,
}
