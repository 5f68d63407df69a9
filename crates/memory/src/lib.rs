//! Every byte of device memory has a name.
//!
//! All memory that a training step touches is leased from one [`Memory`], with a [`Category`], a name and a [`Place`].
//! The [`Ledger`] knows what is live now, and what was live at the peak. Memory that lives across steps is in an
//! [`Arena`]. A step's leases are in a slab, where a deterministic allocator ([`Slab`]) places them. [`Memory::shapes`]
//! runs the same ledger and the same allocator without memory: plans are made with it.
//!
//! This crate never computes anything on the data, never decides what to keep or drop, and never allocates
//! device memory other than through a lease.
//!
//! ```
//! use memory::{Category, DType, Layer, Memory, Phase};
//!
//! let memory = Memory::host();
//! let _place = memory.enter(Phase::Forward, Layer::Block(3));
//! let gate = memory.lease(Category::Activation, "gate", [8, 64], DType::F32)?;
//! assert_eq!(memory.live_bytes(), 8 * 64 * 4);
//! drop(gate);
//! assert_eq!(memory.live_bytes(), 0);
//! # Ok::<(), memory::OutOfMemory>(())
//! ```

mod arena;
mod backing;
mod blocks;
mod buffer;
mod bytes;
mod category;
mod clock;
mod codes;
mod cover;
mod dims;
mod dtype;
mod each;
mod entry;
mod history;
mod home;
mod host;
mod layout;
mod layout_of_stage;
mod ledger;
mod memory;
mod out_of_memory;
mod parked;
mod parking;
mod place;
mod placing;
mod playback;
mod rank;
mod role;
mod shards;
mod slab;
mod stages;
mod state;
mod types;
mod view;

#[cfg(test)]
mod device_tests;

pub use arena::{Arena, ArenaLease, ArenaPlace};
pub use blocks::{Blocks, DeviceBytes, DeviceMarks, Refused, Stamp};
pub use buffer::{Buffer, Windows};
pub use bytes::format_bytes;
pub use category::{ByCategory, Category, EachCategory, Space};
pub use clock::PhaseTime;
pub use codes::{CodePlaces, Codes};
pub use cover::Cover;
pub use dims::Dims;
pub use dtype::{DType, E4m3, E5m2, Element};
pub use entry::{Entry, GRAIN_ELEMENTS, PARAMETER_PADDING};
pub use history::{Address, History, MemoryChange, MemoryEvent};
pub use home::{Home, Homes, UpdateTime, Window};
pub use host::HostBlock;
pub use layout::{Layout, LayoutBuilder, Unit};
pub use ledger::{Lease, Ledger, LiveLease, Peak};
pub use memory::{Memory, PlaceGuard, StepMemory};
pub use out_of_memory::{Cause, OutOfMemory, Refusal};
pub use parked::Parked;
pub use place::{ByPhase, Layer, Phase, Place};
pub use playback::{AfterEvent, Playback};
pub use rank::{OwnParts, Rank};
pub use role::Role;
pub use slab::Slab;
pub use types::Types;
pub use view::{In, Out};

/// Every lease is rounded up to a multiple of this many bytes, on every target. It suits any vector load, tensor-core
/// tiles, and NVIDIA's libraries, which need 256-byte alignment.
pub const GRANULARITY_BYTES: u64 = 256;

/// `bytes` rounded up to the granularity of a lease.
pub fn round_up(bytes: u64) -> u64 {
    bytes.next_multiple_of(GRANULARITY_BYTES)
}

/// Where tensors of these sizes lie in one buffer. Each begins at a multiple of the granularity.
pub fn one_behind_another(bytes: impl IntoIterator<Item = usize>) -> Vec<std::ops::Range<usize>> {
    let mut next = 0;
    let place = |bytes: usize| {
        let start = next;
        next = (start + bytes).next_multiple_of(GRANULARITY_BYTES as usize);
        start..start + bytes
    };
    bytes.into_iter().map(place).collect()
}
