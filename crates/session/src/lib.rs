//! Training steps, evaluation and generation, composed from model and optimizer.
//!
//! [`Session`] trains, and evaluates and generates between steps; it is the same code for a run and, on shapes, for its plan.
//! Weights and optimizer states go into it and out of it by name. [`Inference`] has a model's weights alone.

mod asleep;
mod beside_targets;
mod calls;
mod copies;
#[cfg(test)]
mod disk_faults;
mod error;
mod evaluation;
mod forward;
mod generation;
mod incoming;
mod inference;
mod losses;
mod neighbours;
mod open;
mod outcome;
mod passes;
mod peaks_between_steps;
mod read_back;
mod routers;
mod sampling;
mod saving;
mod session;
mod shapes;
mod snapshot;
mod sum_of_ranks;
mod update;
mod upload;
mod weights;

pub use asleep::Asleep;
pub use calls::{LibraryCalls, StepCalls, calls_of_a_step, library_calls};
pub use copies::NamedStateCopy;
pub use error::{OptimizerStateError, Result, SessionError};
pub use evaluation::Evaluation;
pub use forward::{Forward, WhichModel};
pub use generation::{CachedText, Generated, Generation, PROMPT_CHUNK};
pub use incoming::IncomingWeights;
pub use inference::Inference;
pub use outcome::{PolicyNumbers, Rewards, StepOutcome};
pub use peaks_between_steps::{PeaksBetween, longest_and_shortest};
pub use routers::RouterChoices;
pub use sampling::Sampling;
pub use saving::SavedBytes;
pub use session::Session;
pub use shapes::{
    MICRO_BATCHES_MAX, few_micro_batches, micro_batches_on_shapes, shape_of_a_micro_batch,
    shape_of_a_step, shape_of_micro_batches,
};
pub use snapshot::{SessionState, StateOnHost};
pub use upload::LentTokens;
