//! A snapshot of PyTorch's allocator (`torch.cuda.memory._dump_snapshot`, 2.1 to 2.13), and the same from `--trace`.
//!
//! Allocations have the sizes that were asked for. They are live from `alloc` to `free_completed`, as PyTorch's
//! `_memory_viz.py` and memory viewer count them. What was live when recording began shows twice: as what is freed without
//! having been allocated, and as blocks that are live at the end and that no event allocated.

use crate::frames::{CodeLines, printable};
use crate::peak::{LiveGroup, RecordedPeak, ReservedMemory};
use crate::pickle::{HELD_BYTES_MAX, PickleError, read_pickle};
use crate::tree::{PickleTree, PickleValue};
use std::collections::HashMap;
use std::io::BufRead;

/// Entries and blocks that a snapshot may have. Distinct ones beyond that would not fit a pickle's memory.
const ENTRIES_MAX: usize = 4 << 20;

/// The largest size of anything: no device has so much memory, and sums of so many entries stay below 2^63.
const SIZE_MAX: i64 = 1 << 40;

/// The highest number of a device.
const DEVICE_MAX: i64 = 4095;

/// The place of what was live before.
pub(crate) const BEFORE: &str = "before recording began";

/// Why a snapshot is not understood.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// Its pickle is not read.
    #[error(transparent)]
    Pickle(#[from] PickleError),
    /// The pickle holds something else.
    #[error("it is no memory snapshot: {0}; `torch.cuda.memory._dump_snapshot(FILE)` writes one")]
    Foreign(String),
}

/// A snapshot of all devices.
#[derive(Debug)]
pub struct MemorySnapshot {
    tree: PickleTree,
    devices: Vec<DeviceTrace>,
}

/// The part of a snapshot that is about one device.
#[derive(Debug)]
struct DeviceTrace {
    device: u32,
    /// The list of its entries.
    trace: PickleValue,
    blocks: Vec<LiveBlock>,
    reserved_bytes: i64,
    segments: u64,
    free_bytes: i64,
    largest_free_bytes: i64,
}

/// A block that is live at the end.
#[derive(Clone, Copy, Debug)]
struct LiveBlock {
    address: i64,
    bytes: i64,
    rounding_bytes: i64,
    waits: bool,
    value: PickleValue,
}

/// An allocation that is live.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Allocation {
    pub(crate) bytes: i64,
    /// The number of its group.
    pub(crate) group: usize,
    waits: bool,
}

/// The change that an entry of a trace made.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TraceChange {
    Began(Allocation),
    /// It has been freed and waits for another stream.
    Waits(Allocation),
    Ended(Allocation),
    /// A block was freed that was live before the first entry.
    EndedFromBefore(i64),
    /// The allocator took bytes of the driver, or gave them back.
    Reserved(i64),
}

/// The groups of allocations, by number.
#[derive(Default)]
pub(crate) struct Groups {
    lines: CodeLines,
    numbers: HashMap<(PickleKey, String), usize>,
    by_name: HashMap<LiveGroupName, usize>,
    pub(crate) names: Vec<LiveGroupName>,
}

/// The number of a container, or of none.
type PickleKey = Option<u32>;

/// The key of a group: what its allocations have in common.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LiveGroupName {
    pub(crate) place: String,
    pub(crate) line: Option<u32>,
    pub(crate) category: String,
}

impl Groups {
    /// The group of an entry or a block.
    fn of(&mut self, tree: &PickleTree, value: PickleValue) -> usize {
        let frames = tree.field(value, "frames").or_else(|| {
            // Blocks of PyTorch 2.0 had a history.
            let history = tree.list_field(value, "history")?;
            tree.field(*history.first()?, "frames")
        });
        let category = tree.text_field(value, "category").unwrap_or("unknown");
        let stack = match frames {
            Some(PickleValue::List(number)) => Some(number),
            _ => None,
        };
        let key = (stack, category.to_owned());
        if let Some(number) = stack.and_then(|_| self.numbers.get(&key)) {
            return *number;
        }
        let line = frames.and_then(|frames| self.lines.of_stack(tree, frames));
        let metadata = || {
            tree.text_field(value, "user_metadata")
                .filter(|text| !text.is_empty())
        };
        let (place, line) = match line {
            Some(line) => (line.place, line.line),
            None => (printable(metadata().unwrap_or("no stack recorded")), None),
        };
        let number = self.named(LiveGroupName {
            place,
            line,
            category: printable(category),
        });
        self.numbers.insert(key, number);
        number
    }

    fn named(&mut self, name: LiveGroupName) -> usize {
        let new = self.names.len();
        let number = *self.by_name.entry(name.clone()).or_insert(new);
        if number == new {
            self.names.push(name);
        }
        number
    }

    /// The group of what was live before, without a stack of its allocation.
    fn before(&mut self) -> usize {
        self.named(LiveGroupName {
            place: BEFORE.into(),
            line: None,
            category: "unknown".into(),
        })
    }
}

/// The blocks that were live before a trace began, by group.
pub(crate) struct LiveBefore {
    /// Blocks that are freed in the trace.
    pub(crate) freed_bytes: i64,
    freed_count: u64,
    /// Blocks that are live at the end, too.
    pub(crate) kept: Vec<(usize, i64)>,
    waiting_bytes: i64,
}

impl LiveBefore {
    pub(crate) fn bytes(&self) -> i64 {
        self.freed_bytes + self.kept.iter().map(|(_, bytes)| bytes).sum::<i64>()
    }
}

impl MemorySnapshot {
    /// Reads a snapshot.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn read(input: impl BufRead) -> Result<MemorySnapshot, SnapshotError> {
        let tree = read_pickle(input, HELD_BYTES_MAX)?;
        let mut entries = 0;
        let devices = devices(&tree, &mut entries)?;
        Ok(MemorySnapshot { tree, devices })
    }

    /// The peaks of all devices that a snapshot says something of, by number.
    ///
    /// # Errors
    /// [`SnapshotError::Foreign`].
    pub fn peaks(&self) -> Result<Vec<RecordedPeak>, SnapshotError> {
        self.devices
            .iter()
            .map(|device| self.peak(device))
            .collect()
    }

    /// Goes through a device's trace; returns what was live before it.
    pub(crate) fn follow(
        &self,
        device: u32,
        groups: &mut Groups,
        on: impl FnMut(usize, PickleValue, TraceChange),
    ) -> Result<LiveBefore, SnapshotError> {
        let trace = self.devices.iter().find(|trace| trace.device == device);
        let trace = trace.ok_or_else(|| foreign(format!("there is no device {device}")))?;
        follow(&self.tree, trace, groups, on)
    }

    /// The entries of a device's trace.
    pub(crate) fn trace(&self, device: u32) -> &[PickleValue] {
        let trace = self.devices.iter().find(|trace| trace.device == device);
        trace
            .and_then(|trace| self.tree.list(trace.trace))
            .unwrap_or(&[])
    }

    /// The time of an entry in microseconds, where it has one.
    pub(crate) fn time_us(&self, entry: PickleValue) -> Option<i64> {
        self.tree.int_field(entry, "time_us")
    }

    fn peak(&self, device: &DeviceTrace) -> Result<RecordedPeak, SnapshotError> {
        let mut groups = Groups::default();
        // First the highest sum, relative to what was live before, then what made it up.
        let (mut live, mut highest, mut at) = (0, 0, None);
        let (mut reserved, mut reserved_at_peak, mut reserved_highest) = (0, 0, 0);
        let before = follow(&self.tree, device, &mut groups, |entry, _, change| {
            match change {
                TraceChange::Began(allocation) => live += allocation.bytes,
                TraceChange::Ended(allocation) => live -= allocation.bytes,
                TraceChange::EndedFromBefore(bytes) => live -= bytes,
                TraceChange::Reserved(bytes) => reserved += bytes,
                TraceChange::Waits(_) => {}
            }
            reserved_highest = reserved_highest.max(reserved);
            if live > highest {
                (highest, at, reserved_at_peak) = (live, Some(entry), reserved);
            }
        })?;
        let reserved_before = device.reserved_bytes - reserved;
        let (live, waiting_bytes) = self.live_at(device, &mut groups, at, &before)?;
        let mut by_category = std::collections::BTreeMap::new();
        for group in &live {
            *by_category.entry(group.category.clone()).or_default() += group.bytes;
        }
        let entries = self.tree.list(device.trace).map_or(0, <[_]>::len);
        let bytes = |bytes: i64| bytes.max(0) as u64;
        let sum = |of: fn(&LiveBlock) -> i64| bytes(device.blocks.iter().map(of).sum());
        Ok(RecordedPeak {
            device: device.device,
            peak_bytes: bytes(before.bytes() + highest),
            at: match (at, entries) {
                (_, 0) => "when the snapshot was taken".into(),
                (None, _) => "when recording began".into(),
                (Some(entry), _) => format!("at event {} of {entries}", entry + 1),
            },
            counted: match entries {
                0 => "No events were recorded, so this is what was live when the snapshot was taken, and no peak: call \
                      `torch.cuda.memory._record_memory_history()` before what is to be measured."
                    .into(),
                _ => format!(
                    "The largest sum of allocated bytes over {entries} recorded events. {} bytes were live when recording \
                     began, counted from the segments and from what was freed without having been allocated.",
                    before.bytes()
                ),
            },
            is_recorded: entries > 0,
            waiting_bytes,
            by_category,
            live,
            reserved: Some(ReservedMemory {
                at_peak_bytes: bytes(reserved_before + reserved_at_peak),
                peak_bytes: bytes(reserved_before + reserved_highest),
                end_bytes: bytes(device.reserved_bytes),
                segments: device.segments,
                live_bytes: sum(|block| block.bytes),
                rounding_bytes: sum(|block| block.rounding_bytes),
                free_bytes: bytes(device.free_bytes),
                largest_free_bytes: bytes(device.largest_free_bytes),
            }),
        })
    }

    /// What was live after an entry, or when recording began, largest first; and bytes that waited for a stream.
    fn live_at(
        &self,
        device: &DeviceTrace,
        groups: &mut Groups,
        at: Option<usize>,
        before: &LiveBefore,
    ) -> Result<(Vec<LiveGroup>, u64), SnapshotError> {
        let is_past = |entry: usize| at.is_none_or(|at| entry > at);
        let mut sums: HashMap<usize, (i64, u64)> = HashMap::new();
        let (mut freed_bytes, mut freed_count, mut waiting) =
            (before.freed_bytes, before.freed_count, 0);
        follow(&self.tree, device, groups, |entry, _, change| {
            if is_past(entry) {
                return;
            }
            match change {
                TraceChange::Began(Allocation { bytes, group, .. }) => {
                    let (sum, count) = sums.entry(group).or_default();
                    (*sum, *count) = (*sum + bytes, *count + 1);
                }
                TraceChange::Waits(allocation) => waiting += allocation.bytes,
                TraceChange::Ended(Allocation {
                    bytes,
                    group,
                    waits,
                }) => {
                    let (sum, count) = sums.entry(group).or_default();
                    (*sum, *count) = (*sum - bytes, *count - 1);
                    waiting -= if waits { bytes } else { 0 };
                }
                TraceChange::EndedFromBefore(bytes) => {
                    (freed_bytes, freed_count) = (freed_bytes - bytes, freed_count - 1);
                }
                TraceChange::Reserved(_) => {}
            }
        })?;
        for (group, bytes) in &before.kept {
            let (sum, count) = sums.entry(*group).or_default();
            (*sum, *count) = (*sum + bytes, *count + 1);
        }
        if freed_bytes > 0 {
            let (sum, count) = sums.entry(groups.before()).or_default();
            (*sum, *count) = (*sum + freed_bytes, *count + freed_count);
        }
        // Without events, what waits at the end waits now.
        let waiting = waiting
            + if at.is_none() {
                before.waiting_bytes
            } else {
                0
            };
        let mut live: Vec<LiveGroup> = sums
            .into_iter()
            .filter(|(_, (bytes, _))| *bytes > 0)
            .map(|(group, (bytes, count))| {
                let LiveGroupName {
                    place,
                    line,
                    category,
                } = groups.names[group].clone();
                LiveGroup {
                    place,
                    line,
                    category,
                    bytes: bytes as u64,
                    count,
                }
            })
            .collect();
        live.sort_by(|a, b| {
            let rest =
                |group: &LiveGroup| (group.place.clone(), group.line, group.category.clone());
            b.bytes.cmp(&a.bytes).then_with(|| rest(a).cmp(&rest(b)))
        });
        Ok((live, waiting.max(0) as u64))
    }
}

fn foreign(reason: impl Into<String>) -> SnapshotError {
    SnapshotError::Foreign(reason.into())
}

/// A size, which every entry and block must have.
fn size(tree: &PickleTree, value: PickleValue, name: &str) -> Result<i64, SnapshotError> {
    let size = tree.int_field(value, name);
    let size = size.filter(|size| (0..=SIZE_MAX).contains(size));
    size.ok_or_else(|| foreign(format!("something in it has no sound `{name}`")))
}

/// The parts of a snapshot, one for each device that it has something about.
fn devices(tree: &PickleTree, entries: &mut usize) -> Result<Vec<DeviceTrace>, SnapshotError> {
    // `torch.cuda.memory_snapshot()` is the list of segments alone.
    let segments = tree
        .list(tree.root)
        .or_else(|| tree.list_field(tree.root, "segments"));
    let segments = segments.ok_or_else(|| foreign("it has no `segments`"))?;
    let mut devices: HashMap<u32, DeviceTrace> = HashMap::new();
    let traces = tree.list_field(tree.root, "device_traces").unwrap_or(&[]);
    if traces.len() as i64 > DEVICE_MAX + 1 {
        return Err(foreign(format!("it has {} devices", traces.len())));
    }
    for (number, trace) in traces.iter().enumerate() {
        let count = tree
            .list(*trace)
            .ok_or_else(|| foreign("a trace is no list"))?
            .len();
        take(entries, count)?;
        if count > 0 {
            device(&mut devices, number as u32).trace = *trace;
        }
    }
    take(entries, segments.len())?;
    for segment in segments {
        let number = tree.int_field(*segment, "device").unwrap_or(0);
        if !(0..=DEVICE_MAX).contains(&number) {
            return Err(foreign(format!("a segment is of device {number}")));
        }
        add_segment(tree, *segment, device(&mut devices, number as u32), entries)?;
    }
    let mut devices: Vec<DeviceTrace> = devices.into_values().collect();
    devices.sort_by_key(|device| device.device);
    match devices.is_empty() {
        true => Err(foreign("it has neither segments nor events")),
        false => Ok(devices),
    }
}

fn take(entries: &mut usize, count: usize) -> Result<(), SnapshotError> {
    *entries += count;
    match *entries <= ENTRIES_MAX {
        true => Ok(()),
        false => Err(foreign(format!(
            "it has more than {ENTRIES_MAX} entries; record fewer steps"
        ))),
    }
}

fn device(devices: &mut HashMap<u32, DeviceTrace>, number: u32) -> &mut DeviceTrace {
    devices.entry(number).or_insert_with(|| DeviceTrace {
        device: number,
        trace: PickleValue::None,
        blocks: Vec::new(),
        reserved_bytes: 0,
        segments: 0,
        free_bytes: 0,
        largest_free_bytes: 0,
    })
}

fn add_segment(
    tree: &PickleTree,
    segment: PickleValue,
    device: &mut DeviceTrace,
    entries: &mut usize,
) -> Result<(), SnapshotError> {
    let blocks = tree.list_field(segment, "blocks");
    let blocks = blocks.ok_or_else(|| foreign("a segment has no `blocks`"))?;
    take(entries, blocks.len())?;
    device.segments += 1;
    device.reserved_bytes += size(tree, segment, "total_size")?;
    let mut address = tree.int_field(segment, "address").unwrap_or(0);
    for block in blocks {
        let bytes = size(tree, *block, "size")?;
        // Blocks of PyTorch 2.1 have no addresses; they lie side by side.
        let begin = tree.int_field(*block, "address").unwrap_or(address);
        address = begin.saturating_add(bytes);
        let state = tree.text_field(*block, "state").unwrap_or("");
        if !state.starts_with("active") {
            device.free_bytes += bytes;
            device.largest_free_bytes = device.largest_free_bytes.max(bytes);
            continue;
        }
        let requested = requested(tree, *block)?.unwrap_or(bytes);
        device.blocks.push(LiveBlock {
            address: begin,
            bytes: requested,
            rounding_bytes: (bytes - requested).max(0),
            waits: state != "active_allocated",
            value: *block,
        });
    }
    Ok(())
}

/// The bytes that a block was asked for, where it says so; PyTorch 2.0 said so in a history.
fn requested(tree: &PickleTree, block: PickleValue) -> Result<Option<i64>, SnapshotError> {
    if tree.field(block, "requested_size").is_some() {
        return size(tree, block, "requested_size").map(Some);
    }
    let history = tree.list_field(block, "history").and_then(<[_]>::first);
    history
        .map(|last| size(tree, *last, "real_size"))
        .transpose()
}

/// Goes through the entries of a trace.
fn follow(
    tree: &PickleTree,
    device: &DeviceTrace,
    groups: &mut Groups,
    mut on: impl FnMut(usize, PickleValue, TraceChange),
) -> Result<LiveBefore, SnapshotError> {
    let mut live: HashMap<i64, Allocation> = HashMap::new();
    let mut before = LiveBefore {
        freed_bytes: 0,
        freed_count: 0,
        kept: Vec::new(),
        waiting_bytes: 0,
    };
    for (number, entry) in tree.list(device.trace).unwrap_or(&[]).iter().enumerate() {
        let action = tree.text_field(*entry, "action");
        let action =
            action.ok_or_else(|| foreign(format!("event {} has no `action`", number + 1)))?;
        let mut tell = |change| on(number, *entry, change);
        let sized = || -> Result<(i64, i64), SnapshotError> {
            let address = tree.int_field(*entry, "addr");
            let address =
                address.ok_or_else(|| foreign(format!("event {} has no `addr`", number + 1)))?;
            Ok((address, size(tree, *entry, "size")?))
        };
        match action {
            "alloc" => {
                let (address, bytes) = sized()?;
                let allocation = Allocation {
                    bytes,
                    group: groups.of(tree, *entry),
                    waits: false,
                };
                // A trace that has lost entries may lack the end of what was here.
                if let Some(ended) = live.insert(address, allocation) {
                    tell(TraceChange::Ended(ended));
                }
                tell(TraceChange::Began(allocation));
            }
            "free_requested" => {
                let (address, _) = sized()?;
                if let Some(allocation) = live
                    .get_mut(&address)
                    .filter(|allocation| !allocation.waits)
                {
                    allocation.waits = true;
                    tell(TraceChange::Waits(*allocation));
                }
            }
            "free_completed" | "free" => {
                let (address, bytes) = sized()?;
                match live.remove(&address) {
                    Some(ended) => tell(TraceChange::Ended(ended)),
                    None => {
                        before.freed_bytes += bytes;
                        before.freed_count += 1;
                        tell(TraceChange::EndedFromBefore(bytes));
                    }
                }
            }
            "segment_alloc" | "segment_map" => tell(TraceChange::Reserved(sized()?.1)),
            "segment_free" | "segment_unmap" => tell(TraceChange::Reserved(-sized()?.1)),
            // `oom`, `snapshot`, and what later versions add, change nothing.
            _ => {}
        }
    }
    for block in device
        .blocks
        .iter()
        .filter(|block| !live.contains_key(&block.address))
    {
        let has_stack = tree
            .list_field(block.value, "frames")
            .is_some_and(|frames| !frames.is_empty());
        let group = match has_stack || tree.field(block.value, "history").is_some() {
            true => groups.of(tree, block.value),
            false => groups.before(),
        };
        before.kept.push((group, block.bytes));
        before.waiting_bytes += if block.waits { block.bytes } else { 0 };
    }
    Ok(before)
}
