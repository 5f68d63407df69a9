//! A training step, composed from model and optimizer.
//!
//! [`Session`] is the same code for a run and, on shapes, for its plan. Weights and optimizer states go into it and out of
//! it by name.

mod error;
mod offload;
mod optimizer_state;
mod products;
mod read_back;
#[allow(
    clippy::module_inception,
    reason = "the crate is named after its one idea"
)]
mod session;
mod updating;
mod weights;

pub use error::{OptimizerStateError, SessionError};
pub use products::{MICRO_BATCHES_MAX, products_of_a_step, shape_of_a_step};
pub use session::{Session, StepOutcome};
