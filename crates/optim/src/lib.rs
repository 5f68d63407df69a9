//! AdamW on flat arenas, exact global-norm clipping, learning-rate schedules.
//!
//! The number of calls a step does not depend on the number of tensors: matrices are one range of every arena,
//! vectors another. Norm, clipping factor and rates stay in device memory.
//!
//! This crate never looks at a tensor's name, and never reads a number back from the device within a step.

mod adamw;
mod schedule;

pub use adamw::{AdamW, Hyperparameters};
pub use schedule::{Schedule, ScheduleKind};
