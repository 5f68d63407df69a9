//! Optimizers on flat ranges, exact global-norm clipping, learning-rate schedules.
//!
//! Moments are f32, bf16 or block-wise 8-bit ([`MomentFormat`]). bf16 weights have an f32 master, the 16 bits that
//! they lack of one, 8 of these, or nothing ([`MasterFormat`]). The number of calls a step does not depend on the number of
//! tensors. Matrices are one range of every arena, vectors another, and quantised moments cover a third that overlaps
//! both. Weights, gradients or states that live elsewhere than on the device ([`memory::Homes`]) need one call per
//! chunk. The norm, the clipping factor, the rates and the key of random numbers stay in device memory.
//!
//! This crate knows no model, and never reads a number back from the device within a step.

mod adafactor;
mod adamw;
mod chunks;
mod disk;
mod form;
mod formats;
mod host;
mod master;
mod matrices;
mod moment;
mod muon;
mod named;
mod numbers;
mod optimizer;
mod parameter_states;
mod resident;
mod round;
mod rule;
mod saved;
mod schedule;
mod segment;
mod sources;
mod store;
mod streamed;
mod sums;
mod tensor_states;
mod update;

pub use adafactor::Adafactor;
pub use adamw::AdamW;
pub use formats::{MasterFormat, MomentFormat, SMALLEST_QUANTISED};
pub use master::weight_bytes;
pub use muon::{LrAdjust, Muon};
pub use named::NamedState;
pub use optimizer::{Optimizer, Recipe};
pub use rule::{Faster, Hyperparameters, OptimizerKind};
pub use saved::{RestoreError, SavedState};
pub use schedule::{Schedule, ScheduleKind};
pub use update::{StepNumbers, WholeTensor};
