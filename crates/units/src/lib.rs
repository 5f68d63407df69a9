//! Where weights and gradients live: on the device for good, or in pinned host memory, from where the matrices of one
//! part of the model at a time, a *unit* ([`memory::Unit`]), come to the device. Vectors, which are small, never leave it.
//!
//! A unit on the device is a lease of the step, so that what it takes is in the plan like everything else, and its place is
//! anybody's when it has gone. [`Weights`] come before they are used and go when what comes next needs the room; they go back
//! to the host only when an update wrote them. [`Gradients`] are leased before a part's backward pass, filled with what
//! earlier micro-batches made, and sent to the host after it.
//!
//! Copies run beside the computation, and these waits order them; each is needed:
//!
//! | who waits | for what | otherwise |
//! |---|---|---|
//! | the upload | the computation so far (`FREE`) | a unit is written over what is still being read there |
//! | the computation | the upload (`CAME`) | it reads what was there before |
//! | the updates | the upload (`CAME_TO_BE_UPDATED`) | they change what has not come, and that is lost |
//! | the download of gradients | the computation so far (`SUMMED`) | it sends what was there before |
//! | the computation, before a lease ends | the download (`LEFT`) | what is leased next is written over what is being sent |
//!
//! No more are. A unit comes back only after the computation has waited for it to leave, because its lease had ended by then,
//! and uploads wait for the computation. What ranks wait for is in `docs/concepts/ranks.md`.

mod gather;
mod gathered_weights;
mod gradients;
mod grains;
mod ranks;
mod reduction;
mod stream;
mod streamed_gradients;
mod streamed_weights;
mod weights;

pub use gradients::{Gradients, OpenUnit};
pub use ranks::{Ranks, Reduce, Zero};
pub use weights::Weights;

use kernels::KernelError;
use memory::OutOfMemory;

/// A unit cannot come or go.
#[derive(Debug, thiserror::Error)]
pub enum UnitError {
    /// Its lease was refused.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// The device failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}
