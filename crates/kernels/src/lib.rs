//! The operations of a training step, and the devices that run them.
//!
//! An operation is a value with named operands ([`operation`]), which is run by [`Kernels`]:
//!
//! ```
//! use kernels::{AddBias, Fill, cpu::Cpu};
//! use memory::{Category, DType, Memory};
//!
//! let memory = Memory::host();
//! let kernels = Cpu::new(&memory, DType::F32)?;
//! let mut rows = memory.lease(Category::Temporary, "rows", [2, 3], DType::F32)?;
//! let mut bias = memory.lease(Category::Temporary, "bias", [3], DType::F32)?;
//! kernels.run(Fill { out: rows.view_mut(), value: 1.5 })?;
//! kernels.run(Fill { out: bias.view_mut(), value: 1.0 })?;
//! kernels.run(AddBias { out: rows.view_mut(), bias: bias.view().into() })?;
//! assert_eq!(rows.view().slice::<f32>(), [2.5; 6]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Kernels`] checks it and hands it to a [`Backend`]. [`cpu::Cpu`] and [`cuda::Cuda`] compute. [`meta::Meta`] only
//! counts operations, so a step can be planned for a device that is not there. A backend is made inside [`Kernels`], so
//! nothing reaches it unchecked, and it has no check of its own.
//!
//! An operation writes into its operands and never allocates device memory. Scratch comes from one constant workspace,
//! leased when the kernels are made, or from the caller, in the size that the operation's `scratch_elements` tells.
//! Operations are deterministic: the order of every sum is fixed, for any number of threads. Only [`Kernels::download`]
//! and [`Kernels::finish_read`] return numbers to the host. Copies run beside the operations, in queues of their own
//! ([`Queue`]): between device and pinned host memory, between that and files ([`BlockFile`]), and to and from other
//! ranks ([`Exchange`]).
//!
//! This crate knows no model and no policy.

mod backend;
mod block_file;
pub mod cpu;
pub mod cuda;
mod error;
mod exchange;
mod families;
mod kernels;
pub mod meta;
mod numerics;
pub mod operation;
mod queue;
mod request;
mod scratch;
pub mod timed;
mod traffic;
mod workers;
mod workspace;

pub use backend::{Backend, Queues};
pub use block_file::{BlockFile, DiskCopy, HostSide, NoFile};
pub use error::{Fault, KernelError, Result};
pub use exchange::{Exchange, ExchangeBytes};
pub use kernels::Kernels;
pub use meta::timeline;
pub use numerics::{fp8, quantise, random, split};
pub use operation::*;
pub use queue::{Event, Queue, READING_BYTES_MAX, READINGS_MAX, Reading, Section};
pub use request::Request;
pub use traffic::{Account, AccountScope, StepTraffic, Traffic};
pub use workspace::{Target, workspace_bytes};
