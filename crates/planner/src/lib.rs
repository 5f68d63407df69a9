//! What a run will need, to the byte, and what other settings would change.
//!
//! A [`Plan`] makes one training step on shapes: the same code, the same leases, the same placement, no memory. An
//! [`OomReport`] plans other settings to find those that would have fitted, and [`HostRoom`] compares what a run needs of
//! the host with what there is.

mod activations;
mod alternatives;
mod arenas;
mod changes;
mod control_group;
mod copies;
mod figures;
mod formulas;
mod gpus;
mod host_room;
mod korthikanti;
pub mod memory_size;
mod notes;
mod oom;
mod plan;
mod table;

pub use activations::PlannedActivation;
pub use alternatives::{Effect, Strategy};
pub use arenas::{HOST_ARENAS, PlannedArena, arena_table};
pub use copies::PlannedOffload;
pub use formulas::Formula;
pub use gpus::CUDA_OVERHEAD_BYTES;
pub use host_room::{HostNeed, HostRoom, NoHostRoom};
pub use oom::{Fix, OomReport, Tried};
pub use plan::Plan;
