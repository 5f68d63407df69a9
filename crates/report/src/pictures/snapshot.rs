//! Writes `snapshot.pickle`, with the contents of PyTorch's `torch.cuda.memory._snapshot()`, for its memory viewer and
//! `torch/cuda/_memory_viz.py`.
//!
//! The history becomes a device's trace of allocations, from the start of loading. Leases that live across steps have
//! their own segments, and the leases of steps share one, the slab. Page-locked host memory is left out, because the
//! viewer would count it as the device's, and so are leases without bytes, which share addresses with others.

use super::{RefusedLease, Trace};
use memory::{Address, Category, Lease, MemoryChange, Place, Playback};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;

/// The address of the first segment. Addresses only distinguish segments.
const FIRST_ADDRESS: u64 = 0x7f00_0000_0000;

/// Segments begin at multiples of this, as blocks of NVIDIA's driver do.
const ALIGNMENT: u64 = 2 << 20;

/// Bytes, an address or microseconds. Signed, because serde-pickle writes an unsigned number beyond 31 bits in nine
/// bytes, which the viewer reads as a `BigInt` and cannot add to other numbers.
#[derive(Clone, Copy, Serialize)]
struct Number(i64);

impl From<u64> for Number {
    fn from(number: u64) -> Number {
        Number(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

#[derive(Serialize)]
struct Snapshot {
    segments: Vec<Segment>,
    device_traces: Vec<Vec<Entry>>,
    allocator_settings: BTreeMap<String, String>,
    external_annotations: Vec<String>,
}

#[derive(Serialize)]
struct Segment {
    device: u32,
    address: Number,
    total_size: Number,
    allocated_size: Number,
    active_size: Number,
    requested_size: Number,
    stream: u32,
    segment_type: &'static str,
    segment_pool_id: (u32, u32),
    is_expandable: bool,
    frames: Vec<Frame>,
    blocks: Vec<Block>,
}

#[derive(Serialize)]
struct Block {
    address: Number,
    size: Number,
    requested_size: Number,
    state: &'static str,
    frames: Vec<Frame>,
}

/// The viewer shows it as `filename:line:name`.
#[derive(Clone, Serialize)]
struct Frame {
    filename: String,
    line: u32,
    name: String,
}

#[derive(Serialize)]
struct Entry {
    action: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    addr: Option<Number>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device_free: Option<Number>,
    size: Number,
    stream: u32,
    time_us: Number,
    frames: Vec<Frame>,
    user_metadata: String,
    pool_id: (u32, u32),
    /// The viewer colours allocations by it. If any entry has one, it requires `unknown` among them and fails
    /// otherwise; segments have that.
    #[serde(skip_serializing_if = "Option::is_none")]
    category: Option<&'static str>,
}

/// Writes the snapshot of a run.
pub(super) fn write(
    out: &mut impl io::Write,
    trace: &Trace,
    playback: &Playback,
) -> io::Result<()> {
    let mut allocator = Allocator::new(trace);
    let refused = trace.refused.as_ref();
    let refused = refused.map(|refused| (playback.last_with(refused.live_bytes), refused));
    for (number, event) in trace.history.events.iter().enumerate() {
        allocator.time_us = (playback.instants[number].at_s * 1e6).round() as u64;
        allocator.follow(&event.change);
        if let Some((_, refused)) = refused.filter(|(at, _)| *at == number) {
            allocator.refuse(refused);
        }
    }
    let snapshot = Snapshot {
        segments: allocator.segments(),
        device_traces: vec![allocator.entries],
        allocator_settings: BTreeMap::new(),
        external_annotations: Vec::new(),
    };
    serde_pickle::to_writer(out, &snapshot, serde_pickle::SerOptions::new().proto_v2())
        .map_err(io::Error::other)
}

/// Assigns addresses to leases.
struct Allocator {
    entries: Vec<Entry>,
    time_us: u64,
    /// The live leases with their addresses, by number.
    live: Vec<Option<(u64, Lease)>>,
    /// The size of each segment that exists, by address.
    sizes: BTreeMap<u64, u64>,
    next_address: u64,
    slab_bytes: u64,
    slab: Option<u64>,
}

impl Allocator {
    fn new(trace: &Trace) -> Allocator {
        // Without real memory, the slab was not reserved, so it is as large as its leases reach.
        let reach = |change: &MemoryChange| match *change {
            MemoryChange::ReserveSlab { bytes } => bytes,
            MemoryChange::Take {
                lease,
                address: Address::Slab { offset },
                ..
            } => offset + lease.bytes,
            _ => 0,
        };
        let events = trace.history.events.iter();
        Allocator {
            entries: Vec::with_capacity(2 * trace.history.events.len()),
            time_us: 0,
            live: Vec::new(),
            sizes: BTreeMap::new(),
            next_address: FIRST_ADDRESS,
            slab_bytes: events.map(|event| reach(&event.change)).max().unwrap_or(0),
            slab: None,
        }
    }

    fn follow(&mut self, change: &MemoryChange) {
        match *change {
            MemoryChange::Take {
                number,
                lease,
                address,
            } => self.take(number, lease, address),
            MemoryChange::GiveBack { number } => {
                if let Some((address, lease)) = self.live.get_mut(number).and_then(Option::take) {
                    self.free(address, &lease);
                    if self.sizes.contains_key(&address) && self.slab != Some(address) {
                        let bytes = self.sizes.remove(&address).unwrap_or(0);
                        self.note_segment("segment_free", address, bytes, lease.name.to_string());
                    }
                }
            }
            MemoryChange::Recategorize { number, category } => {
                if let Some((address, lease)) = self.live.get_mut(number).and_then(Option::take) {
                    self.free(address, &lease);
                    let lease = Lease { category, ..lease };
                    self.allocate(number, address, lease);
                }
            }
            MemoryChange::ReserveSlab { .. } => {
                self.slab();
            }
            MemoryChange::Enter(_) | MemoryChange::BeginStep => (),
        }
    }

    fn take(&mut self, number: usize, lease: Lease, address: Address) {
        if lease.bytes == 0 {
            return;
        }
        let address = match address {
            Address::Pinned => return,
            Address::Slab { offset } => self.slab() + offset,
            Address::Own => self.segment(lease.bytes, lease.name.to_string()),
        };
        self.allocate(number, address, lease);
    }

    /// The slab's address. Reserves it on first use.
    fn slab(&mut self) -> u64 {
        let made = self.slab;
        let address = made.unwrap_or_else(|| self.segment(self.slab_bytes, "slab".to_string()));
        self.slab = Some(address);
        address
    }

    /// Reserves a segment; returns its address.
    fn segment(&mut self, bytes: u64, user_metadata: String) -> u64 {
        let address = self.next_address;
        self.next_address = (address + bytes.max(1)).next_multiple_of(ALIGNMENT);
        self.sizes.insert(address, bytes);
        self.note_segment("segment_alloc", address, bytes, user_metadata);
        address
    }

    fn allocate(&mut self, number: usize, address: u64, lease: Lease) {
        if self.live.len() <= number {
            self.live.resize(number + 1, None);
        }
        self.live[number] = Some((address, lease));
        self.note("alloc", address, &lease, Some(lease.category));
    }

    fn free(&mut self, address: u64, lease: &Lease) {
        self.note("free_requested", address, lease, None);
        self.note("free_completed", address, lease, None);
    }

    fn note(
        &mut self,
        action: &'static str,
        address: u64,
        lease: &Lease,
        category: Option<Category>,
    ) {
        let mut entry = self.entry(action, lease.bytes, describe(lease.name, lease.place));
        entry.addr = Some(address.into());
        entry.category = category.map(Category::name);
        self.entries.push(entry);
    }

    fn note_segment(&mut self, action: &'static str, address: u64, size: u64, name: String) {
        let frame = Frame {
            filename: "reserved".to_string(),
            line: 0,
            name: name.clone(),
        };
        let mut entry = self.entry(action, size, (frame, name));
        entry.addr = Some(address.into());
        entry.category = Some("unknown");
        self.entries.push(entry);
    }

    fn refuse(&mut self, refused: &RefusedLease) {
        let described = describe(refused.name, refused.place);
        let mut entry = self.entry("oom", refused.bytes, described);
        entry.device_free = Some(refused.free_bytes.into());
        self.entries.push(entry);
    }

    /// An entry with the fields that all entries have. The caller adds the others.
    fn entry(
        &self,
        action: &'static str,
        size: u64,
        (frame, user_metadata): (Frame, String),
    ) -> Entry {
        Entry {
            action,
            addr: None,
            device_free: None,
            size: size.into(),
            stream: 0,
            time_us: self.time_us.into(),
            frames: vec![frame],
            user_metadata,
            pool_id: (0, 0),
            category: None,
        }
    }

    /// The segments that exist at the end, divided into blocks.
    fn segments(&self) -> Vec<Segment> {
        let mut live: Vec<(u64, Lease)> = self.live.iter().flatten().copied().collect();
        live.sort_unstable_by_key(|(address, _)| *address);
        let mut live = live.into_iter().peekable();
        let mut segments = Vec::with_capacity(self.sizes.len());
        for (&address, &total_size) in &self.sizes {
            let end = address + total_size;
            let (mut blocks, mut reached, mut active_size) = (Vec::new(), address, 0);
            while let Some((at, lease)) = live.next_if(|(at, _)| *at < end) {
                blocks.extend(hole(reached, at));
                blocks.push(Block {
                    address: at.into(),
                    size: lease.bytes.into(),
                    requested_size: lease.bytes.into(),
                    state: "active_allocated",
                    frames: vec![describe(lease.name, lease.place).0],
                });
                reached = at + lease.bytes;
                active_size += lease.bytes;
            }
            blocks.extend(hole(reached, end));
            segments.push(Segment {
                device: 0,
                address: address.into(),
                total_size: total_size.into(),
                allocated_size: active_size.into(),
                active_size: active_size.into(),
                requested_size: active_size.into(),
                stream: 0,
                segment_type: "large",
                segment_pool_id: (0, 0),
                is_expandable: false,
                frames: Vec::new(),
                blocks,
            });
        }
        segments
    }
}

/// A free block between two addresses, if they differ.
fn hole(from: u64, to: u64) -> Option<Block> {
    (from < to).then(|| Block {
        address: from.into(),
        size: (to - from).into(),
        requested_size: 0_u64.into(),
        state: "inactive",
        frames: Vec::new(),
    })
}

/// A tensor as a stack frame, and as the text that the viewer shows under the pointer.
fn describe(name: &str, place: Place) -> (Frame, String) {
    let place = format!("{}, {}", place.phase.name(), place.layer);
    let user_metadata = format!("{place}: `{name}`");
    let frame = Frame {
        filename: place,
        line: 0,
        name: name.to_string(),
    };
    (frame, user_metadata)
}
