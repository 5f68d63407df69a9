//! The results of a step on their way to the host, while the device goes on.

use kernels::{KernelError, Kernels, Reading};
use memory::In;

/// Loss sum and gradient norm of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Results {
    pub(crate) loss_sum: f32,
    pub(crate) grad_norm: f32,
}

/// Results that may not have been computed.
pub(crate) struct PendingResults {
    loss: Reading,
    norm_and_clip: Reading,
}

impl PendingResults {
    /// Sends for `loss [1]` and `norm_and_clip [2]`, both f32.
    pub(crate) fn start(
        kernels: &Kernels,
        loss: In,
        norm_and_clip: In,
    ) -> Result<PendingResults, KernelError> {
        Ok(PendingResults {
            loss: kernels.start_read(loss)?,
            norm_and_clip: kernels.start_read(norm_and_clip)?,
        })
    }

    /// Waits for the results.
    pub(crate) fn finish(self, kernels: &Kernels) -> Result<Results, KernelError> {
        let first = |bytes: Vec<u8>| bytemuck::pod_read_unaligned(&bytes[..size_of::<f32>()]);
        Ok(Results {
            loss_sum: first(kernels.finish_read(self.loss)?),
            grad_norm: first(kernels.finish_read(self.norm_and_clip)?),
        })
    }
}
