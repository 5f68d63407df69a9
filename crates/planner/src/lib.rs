//! Plans what a run needs, to the byte, and what other settings would change.
//!
//! A [`Plan`] makes one training step on shapes: it has the run's code, leases and placement, but no memory. An
//! [`OomReport`] plans other settings to find those that fit. [`HostRoom`] compares what a run needs of the host with
//! what the host has.

mod activations;
mod advice;
mod alternatives;
mod arenas;
mod auto;
mod change;
mod control_group;
mod copies;
mod disk_room;
mod distinct_stages;
mod figures;
mod formulas;
mod freeze;
mod fullest_rank;
mod gpus;
mod head_chunk;
mod host_phases;
mod host_room;
mod inference;
mod korthikanti;
mod largest;
mod layout_table;
mod layouts;
mod levers;
pub mod memory_size;
mod notes;
mod on_paper;
mod oom;
mod operations;
mod other_process;
mod pipeline;
mod plan;
mod ranks;
mod rates;
mod refusal;
mod room;
mod search;
mod step_peaks;
mod table;
mod traffic;

pub use activations::PlannedActivation;
pub use advice::{Advice, OtherTraining};
pub use alternatives::{Effect, Strategy};
pub use arenas::{PlannedArena, arena_table, host_memory};
pub use auto::{
    AutoError, Choice, CostsError, Frontier, MeasuredFor, Point, choose, layers_in_words,
};
pub use copies::PlannedOffload;
pub use disk_room::{DiskNeed, Disks, NoDiskRoom, Saved, SystemDisks};
pub use figures::steps_on_shapes;
pub use formulas::Formula;
pub use freeze::PlannedFreeze;
pub use fullest_rank::as_fullest_rank;
pub use gpus::{
    CUDA_OVERHEAD_BYTES, NcclMemory, UnknownGpu, block_shared_bytes, gpu_memory_bytes,
    overhead_bytes,
};
pub use head_chunk::{ChosenHeadChunk, name_head_chunks};
pub use host_phases::HostPhases;
pub use host_room::{HostNeed, HostRoom, NoHostRoom};
pub use inference::{InferencePlan, PlannedCache};
pub use largest::{Largest, Sought};
pub use layouts::{Bound, Grid, Layouts, PlannedLayout, RefusedLayout, TooLarge};
pub use on_paper::{StepOnPaper, trace};
pub use oom::{Fix, OomReport, Tried};
pub use operations::PlannedOperations;
pub use other_process::{NOTABLE_BYTES, OtherProcess, unowned};
pub use pipeline::{PlannedPipelineStage, PlannedVirtualStage};
pub use plan::Plan;
pub use ranks::{PlannedRanks, PlannedZero, StepTime};
pub use refusal::{first_refused, first_refused_by_device};
pub use room::Room;
pub use search::Rung;
pub use step_peaks::StepPeaks;
pub use traffic::{Crossing, WayBytes};
