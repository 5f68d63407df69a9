//! Where weights and gradients live: on the device, or in pinned host memory. From there the matrices of one part of
//! the model, or some experts of one, come to the device together, as a *unit* ([`memory::Unit`]). Vectors are small and stay on the device.
//!
//! A unit on the device is a lease of the step, so it is in the plan like everything else, and other leases may have
//! its place afterwards. [`Weights`] are fetched before their use, and dropped when the next unit needs the room; they
//! are sent back only if an update wrote them. Matrices that are multiplied in FP8 may come as codes, from the second use in a step
//! on ([`Weights::lease_step_codes`]). [`Gradients`] are leased before a part's backward pass, filled with what
//! earlier micro-batches added, and sent to the host after it.
//!
//! Copies run beside the computation, and these waits order them; each is needed:
//!
//! | who waits | for what | without the wait |
//! |---|---|---|
//! | the upload | the computation so far (`FREE`) | it overwrites what an operation still reads there |
//! | the computation | the upload (`CAME`) | it reads values from before the upload |
//! | the updates | the upload (`CAME_TO_BE_UPDATED`) | the upload overwrites what they have updated |
//! | the download of gradients | the computation so far (`SUMMED`) | it sends values from before the computation |
//! | the computation, before a lease ends | the download (`LEFT`) | the next lease there overwrites what is being sent |
//! | the download of codes | the computation so far (`MADE`) | it sends what was there before the codes |
//! | the computation, before codes' lease ends | their download (`GONE`) | the next lease there overwrites what is being sent |
//!
//! No other waits are needed. A unit is fetched again only after its lease ended, so after the computation has waited
//! for its download, and uploads wait for the computation. `docs/concepts/ranks.md` says what ranks wait for.

mod coded;
mod gather;
mod gathered_weights;
mod gradient_buckets;
mod gradients;
mod grains;
mod ranks;
mod reduction;
mod step_codes;
mod stream;
mod streamed_weights;
mod weights;
mod weights_in_passes;
mod weights_step_codes;

pub use coded::CodeBytes;
pub use gather::{exchange_stages, places_by_owner, to_all};
pub use gradients::{Gradients, OpenUnit};
pub use ranks::{Ranks, Reduce, Zero};
pub use weights::Weights;

use kernels::KernelError;
use memory::OutOfMemory;

/// A unit cannot be fetched or sent.
#[derive(Debug, thiserror::Error)]
pub enum UnitError {
    /// Its lease was refused.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// The device failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}
