//! Bytes between the ranks of a job, over the engines that clusters have: MPI between processes, NCCL between GPUs,
//! loaded at run time. Engines only move bytes; they add nothing up. The libraries' own reductions differ in bits
//! between libraries, sizes and runs, so callers exchange pieces and add them themselves, in the order of ranks.
//!
//! A process asks its environment which rank it is ([`Launch::from_environment`]), and then for an engine ([`start`]):
//!
//! ```no_run
//! use collectives::{Device, Engine, Launch, Patience, start};
//! use std::time::Duration;
//!
//! let Some(launch) = Launch::from_environment()? else {
//!     return Ok(()); // No launcher: this process is alone.
//! };
//! let patience = Patience::new(Duration::from_secs(600));
//! let group = start(&launch, Engine::Auto, Device::Cpu, patience, 0)?;
//! let hosts = group.share(b"what all shall know")?;
//! println!("rank {} of {} by {}", group.rank(), hosts.len(), group.engine());
//! group.leave();
//! # Ok::<(), collectives::GroupError>(())
//! ```
//! After an error a group cannot be used: its owner writes down the reason and calls [`Group::abort`], which ends the
//! others. Read `group.rs` (what an engine does), `launch.rs`, `mpi/` (`interface.rs` has the three binary interfaces,
//! `worker.rs` the one thread that calls the library), then `nccl/`, and `sockets.rs`, through which ranks share bytes
//! where there is no MPI.
//!
//! *Invariant: knows no tensor, no device memory and no step; every wait has a deadline, and every error names what failed.*

mod alone;
mod error;
mod group;
mod launch;
mod loading;
mod mpi;
mod nccl;
mod patience;
pub mod pieces;
mod sockets;
mod start;

pub use alone::Alone;
pub use error::{GroupError, Result};
pub use group::{DeviceGroup, Group, Incoming, Outgoing};
pub use launch::{Launch, Launcher};
pub use nccl::NCCL_CHANNELS;
pub use patience::Patience;
pub use start::{Device, Engine, start};
