//! The error of a refused lease, with all that a person or a program needs to act on it.

use crate::{ByCategory, Category, DeviceBytes, LiveLease, Place, Space, format_bytes};
use serde::Serialize;

/// Why a lease was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Live leases and the request exceed the limit, or the device.
    Capacity,
    /// The slab has enough free bytes, but no hole is large enough.
    Fragmentation,
    /// The device would have room if other processes held none of its memory.
    OtherProcess,
    /// The host refused the memory.
    Host,
}

/// A lease was refused. The error is one pointer wide, because every lease returns it.
#[derive(Clone, Debug, thiserror::Error)]
pub struct OutOfMemory(Box<Refusal>);

impl From<Refusal> for OutOfMemory {
    fn from(refusal: Refusal) -> OutOfMemory {
        OutOfMemory(Box::new(refusal))
    }
}

impl OutOfMemory {
    /// Marks the request as memory outside of leases, of which `bytes` are still to come.
    pub(crate) fn set_beside(&mut self, bytes: u64) {
        self.0.beside_bytes = bytes;
    }
}

impl std::ops::Deref for OutOfMemory {
    type Target = Refusal;

    fn deref(&self) -> &Refusal {
        &self.0
    }
}

/// The facts about a refused lease.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// Device name in messages: `CPU`, `CUDA`.
    pub device: &'static str,
    /// Size of the refused lease, rounded to the granularity.
    pub requested_bytes: u64,
    /// Name of the refused lease.
    pub name: &'static str,
    /// Its category.
    pub category: Category,
    /// Where in the step it was requested.
    pub place: Place,
    /// The memory that it was requested from.
    pub space: Space,
    /// Live device bytes, by category.
    pub live_by_category: ByCategory,
    /// Live leases in device memory, largest first.
    pub live_largest: Vec<LiveLease>,
    /// Bytes of the slab reserved for leases of a step; 0 before it is reserved.
    pub reserved_bytes: u64,
    /// The limit that refused it; none if the system itself refused.
    pub limit_bytes: Option<u64>,
    /// The device's figures for its memory, if it refused.
    pub device_bytes: Option<DeviceBytes>,
    /// What libraries would still have taken of the device's memory, outside of leases.
    pub beside_bytes: u64,
    /// The driver's error, unless it only reports a lack of memory.
    pub driver_error: Option<String>,
    /// The cause.
    pub cause: Cause,
}

impl Refusal {
    /// The most that leases may have in all, if it is known: the limit, or what the device has for this process.
    pub fn room(&self) -> Option<u64> {
        let of_device = self.device_bytes.as_ref().map(DeviceBytes::room);
        let of_device = of_device.map(|room| room.saturating_sub(self.beside_bytes));
        self.limit_bytes.or(of_device)
    }

    fn write_cause(&self, f: &mut std::fmt::Formatter<'_>, live: u64) -> std::fmt::Result {
        match (self.cause, self.limit_bytes, self.device_bytes) {
            (Cause::Fragmentation, ..) => write!(
                f,
                "No hole of the {} slab is large enough",
                format_bytes(self.reserved_bytes)
            ),
            (_, Some(limit), _) => {
                let free = format_bytes(limit.saturating_sub(live));
                write!(
                    f,
                    "The limit is {} ({limit} bytes), of which {free} is free",
                    format_bytes(limit)
                )
            }
            (cause, None, Some(device)) => {
                let [total, free, held, beside] =
                    [device.total, device.free, device.held, device.beside()].map(format_bytes);
                let whose = match cause {
                    Cause::OtherProcess => "other processes hold most of",
                    _ => "this process's context and libraries, and other processes, hold",
                };
                write!(
                    f,
                    "The device has {total}, of which {free} is free; this run holds {held}, and {whose} {beside}"
                )
            }
            (_, None, None) if self.space == Space::Host => write!(
                f,
                "The system refused the page-locked host memory; that is not the device's"
            ),
            (_, None, None) => write!(f, "The system refused the memory"),
        }
    }
}

impl std::fmt::Display for OutOfMemory {
    /// The first sentence keeps PyTorch's wording, which people search for.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let live = self.live_by_category.total();
        write!(
            f,
            "{} out of memory. Tried to allocate {}",
            self.device,
            format_bytes(self.requested_bytes)
        )?;
        write!(
            f,
            " for `{}` ({}; {}). ",
            self.name,
            self.category.name(),
            self.place
        )?;
        self.write_cause(f, live)?;
        if let Some(error) = &self.driver_error {
            write!(f, " (the driver answered {error})")?;
        }
        write!(f, "; {} is leased", format_bytes(live))?;
        if let Some(largest) = self.live_largest.first() {
            write!(
                f,
                ", the largest being `{}` with {}",
                largest.name,
                format_bytes(largest.bytes)
            )?;
        }
        write!(f, ".")
    }
}
