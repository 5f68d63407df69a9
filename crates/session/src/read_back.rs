//! The results of a step on their way to the host, while the device goes on.

use kernels::{KernelError, Kernels, Reading};
use memory::In;

/// Losses and gradient norm of a step.
#[derive(Clone, Debug)]
pub(crate) struct Results {
    /// The parts of the loss ([`model::LossPart`]).
    pub(crate) losses: Vec<f32>,
    pub(crate) grad_norm: f32,
}

/// Results that may not have been computed.
pub(crate) struct PendingResults {
    losses: Reading,
    norm_and_clip: Reading,
}

impl PendingResults {
    /// Sends for `losses [parts]` and `norm_and_clip [2]`, both f32.
    pub(crate) fn start(
        kernels: &Kernels,
        losses: In,
        norm_and_clip: In,
    ) -> Result<PendingResults, KernelError> {
        Ok(PendingResults {
            losses: kernels.start_read(losses)?,
            norm_and_clip: kernels.start_read(norm_and_clip)?,
        })
    }

    /// Whether the results are here.
    pub(crate) fn have_come(&self, kernels: &Kernels) -> bool {
        kernels.has_come(&self.norm_and_clip)
    }

    /// Waits for the results.
    pub(crate) fn finish(self, kernels: &Kernels) -> Result<Results, KernelError> {
        let first = |bytes: Vec<u8>| bytemuck::pod_read_unaligned(&bytes[..size_of::<f32>()]);
        Ok(Results {
            losses: numbers(&kernels.finish_read(self.losses)?),
            grad_norm: first(kernels.finish_read(self.norm_and_clip)?),
        })
    }
}

/// The f32 numbers that were read.
pub(crate) fn numbers(bytes: &[u8]) -> Vec<f32> {
    let words = bytes.chunks_exact(size_of::<f32>());
    words.map(bytemuck::pod_read_unaligned).collect()
}
