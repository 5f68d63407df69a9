//! Training steps, evaluation and generation, composed from model and optimizer.
//!
//! [`Session`] trains, and evaluates and generates between steps; it is the same code for a run and, on shapes, for its plan.
//! Weights and optimizer states go into it and out of it by name. [`Inference`] has a model's weights alone.

mod between;
mod calls;
mod copies;
mod crossed;
#[cfg(test)]
mod disk_faults;
mod error;
mod evaluation;
mod forward;
mod generation;
mod graphs;
mod inference;
mod losses;
mod optimizer_state;
mod orders;
mod outcome;
mod read_back;
mod sampling;
#[allow(
    clippy::module_inception,
    reason = "the crate is named after its one idea"
)]
mod session;
mod snapshot;
mod states_file;
mod update;
mod updating;
mod upload;
mod weights;

pub use between::{PeaksBetween, longest_and_shortest};
pub use calls::{
    LibraryCalls, MICRO_BATCHES_MAX, StepCalls, calls_of_a_step, library_calls,
    shape_of_a_micro_batch, shape_of_a_step, shape_of_micro_batches,
};
pub use copies::NamedStateCopy;
pub use crossed::Crossed;
pub use error::{OptimizerStateError, SessionError};
pub use evaluation::Evaluation;
pub use generation::{Generated, Generation, PROMPT_CHUNK};
pub use inference::Inference;
pub use outcome::StepOutcome;
pub use sampling::Sampling;
pub use session::Session;
pub use snapshot::{SavedBytes, State, StateOnHost};
pub use upload::LentTokens;
