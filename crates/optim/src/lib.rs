//! Optimizers on flat ranges, exact global-norm clipping, learning-rate schedules.
//!
//! Moments are f32, bf16 or block-wise 8-bit ([`MomentFormat`]), bf16 weights have an f32 master, the 16 bits that they
//! leave out of one, or nothing beside them ([`MasterFormat`]). The number of calls a step does not depend on the number
//! of tensors: matrices are one range of every arena, vectors another, and what is quantised a third that overlaps both;
//! what lives elsewhere than on the device ([`memory::Homes`]), weights, gradients or states, takes a call a chunk.
//! Norm, clipping factor, rates and the key of random numbers stay in device memory.
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
mod resident;
mod rule;
mod schedule;
mod segment;
mod store;
mod streamed;
mod sums;
mod tensor_states;
mod update;
mod values;

pub use adafactor::Adafactor;
pub use adamw::AdamW;
pub use formats::{MasterFormat, MomentFormat, SMALLEST_QUANTISED};
pub use muon::{LrAdjust, Muon};
pub use named::{NamedState, RestoreError, SavedState};
pub use numbers::{Hyperparameters, OptimizerKind, StepNumbers};
pub use optimizer::{Optimizer, Recipe};
pub use rule::WholeTensor;
pub use schedule::{Schedule, ScheduleKind};

use half::bf16;
use kernels::{KernelError, Kernels};
use memory::{DType, In};

/// The elements of a flat f32 or bf16 tensor on the host, as f32.
///
/// # Errors
/// [`KernelError`] if the device fails.
pub fn download_f32(kernels: &Kernels, x: In) -> Result<Vec<f32>, KernelError> {
    let mut values = vec![0f32; x.elements()];
    if x.dtype() == DType::BF16 {
        let mut halves = vec![bf16::ZERO; x.elements()];
        kernels.download(bytemuck::cast_slice_mut(&mut halves), x)?;
        values
            .iter_mut()
            .zip(halves)
            .for_each(|(value, half)| *value = half.to_f32());
    } else {
        kernels.download(bytemuck::cast_slice_mut(&mut values), x)?;
    }
    Ok(values)
}
