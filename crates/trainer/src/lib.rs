//! The trainer: configuration, planning, the training loop, run directories.
//!
//! [`session::Session`] composes a step from the other crates; it is the same code for a run and, on shapes, for
//! the plan ([`plan`]). The binary is a thin shell around [`run`].

pub mod cli;
pub mod config;
mod control_group;
mod device;
mod doctor;
pub mod failure;
mod host_room;
mod initialise;
mod interrupt;
mod memory_size;
pub mod offload;
pub mod oom;
pub mod optimizer_state;
pub mod plan;
mod profile;
mod read_back;
mod run;
mod run_dir;
pub mod session;
pub mod settings;
mod stdout;
mod train;
mod updating;
mod weights;

pub use run::run;
