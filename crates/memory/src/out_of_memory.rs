//! A refused lease, with everything a person or a program needs to act on it.

use crate::{ByCategory, Category, LiveLease, Place, Space, format_bytes};
use serde::Serialize;

/// Why a lease was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Live leases and the request exceed the limit.
    Capacity,
    /// The slab has room in all, but no hole that is large enough.
    Fragmentation,
    /// The host refuses the memory.
    Host,
}

/// A lease was refused. One pointer wide, since it is the error of every lease.
#[derive(Clone, Debug, thiserror::Error)]
pub struct OutOfMemory(Box<Refusal>);

impl From<Refusal> for OutOfMemory {
    fn from(refusal: Refusal) -> OutOfMemory {
        OutOfMemory(Box::new(refusal))
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
    /// Device, as a person calls it: `CPU`, `CUDA`.
    pub device: &'static str,
    /// Size of the refused lease, rounded to the granularity.
    pub requested_bytes: u64,
    /// Its name.
    pub name: &'static str,
    /// What it was for.
    pub category: Category,
    /// Where it was asked for.
    pub place: Place,
    /// Which memory.
    pub space: Space,
    /// What was live in the device, by category.
    pub live_by_category: ByCategory,
    /// What was live in the device, largest first.
    pub live_largest: Vec<LiveLease>,
    /// Bytes of the slab reserved for leases of a step; 0 before it is reserved.
    pub reserved_bytes: u64,
    /// The limit that refused it; none where the system itself refused.
    pub limit_bytes: Option<u64>,
    /// Why.
    pub cause: Cause,
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
        match (self.cause, self.limit_bytes) {
            (Cause::Fragmentation, _) => {
                write!(
                    f,
                    "No hole of the {} slab is large enough",
                    format_bytes(self.reserved_bytes)
                )?;
            }
            (_, Some(limit)) => {
                let free = format_bytes(limit.saturating_sub(live));
                write!(
                    f,
                    "The limit is {} ({limit} bytes), of which {free} is free",
                    format_bytes(limit)
                )?;
            }
            (_, None) => write!(f, "The system refused the memory")?,
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
