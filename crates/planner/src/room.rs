//! What a run needs, and the memory that it has to fit.

use crate::disk_room::{DiskNeed, NoDiskRoom, Saved, SystemDisks};
use crate::host_room::{HostNeed, HostRoom};
use memory::Home;

/// What a run needs.
#[derive(Clone, Copy, Default)]
pub(crate) struct Needs {
    /// The most live device bytes, also between steps.
    pub(crate) peak_bytes: u64,
    /// Slab and everything that lives across steps.
    pub(crate) reserved_bytes: u64,
    /// What a device has to hold: reserved bytes, and the overhead.
    pub(crate) device_bytes: u64,
    /// Pinned host memory.
    pub(crate) host_pinned_bytes: u64,
    /// Scratch files on a disk.
    pub(crate) disk_bytes: u64,
}

/// The memory that a run has to fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// A device: reserved bytes and the overhead count.
    Device(u64),
    /// What a device has for leases: reserved bytes count.
    Reserved(u64),
    /// A limit on leases: the peak counts.
    Limit(u64),
}

impl Needs {
    /// The bytes that have to fit.
    pub(crate) fn of(&self, room: Room) -> u64 {
        match room {
            Room::Device(_) => self.device_bytes,
            Room::Reserved(_) => self.reserved_bytes,
            Room::Limit(_) => self.peak_bytes,
        }
    }

    pub(crate) fn fit(&self, room: Room) -> bool {
        let (Room::Device(bytes) | Room::Reserved(bytes) | Room::Limit(bytes)) = room;
        self.of(room) <= bytes
    }

    /// Whether this host, and the disk if states live on one, have room for what is not on the device.
    pub(crate) fn fit_host(&self, host: &HostRoom, states: &Home) -> bool {
        let pinned = host.check(HostNeed::Pinned(self.host_pinned_bytes));
        pinned.is_ok()
            && match states {
                Home::Disk(folder) => {
                    let states = DiskNeed::new(Saved::OptimizerStates, self.disk_bytes, folder);
                    NoDiskRoom::check(&[states], &SystemDisks).is_ok()
                }
                _ => true,
            }
    }

    /// The most of each.
    pub(crate) fn most(self, other: Needs) -> Needs {
        Needs {
            peak_bytes: self.peak_bytes.max(other.peak_bytes),
            reserved_bytes: self.reserved_bytes.max(other.reserved_bytes),
            device_bytes: self.device_bytes.max(other.device_bytes),
            host_pinned_bytes: self.host_pinned_bytes.max(other.host_pinned_bytes),
            disk_bytes: self.disk_bytes.max(other.disk_bytes),
        }
    }
}
