//! The results of a step on their way to the host, while the device goes on.

use files::widen;
use kernels::{KernelError, Kernels, READING_BYTES_MAX, Reading};
use memory::{DType, In};

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

/// f32 numbers on their way to the host.
pub(crate) struct PendingNumbers(Vec<Reading>);

impl PendingNumbers {
    /// Sends for `numbers [n]`.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub(crate) fn start(kernels: &Kernels, numbers: In) -> Result<PendingNumbers, KernelError> {
        let (count, at_once) = (numbers.elements(), READING_BYTES_MAX / size_of::<f32>());
        let parts = (0..count).step_by(at_once).map(|first| {
            let part = numbers.rows(first..count.min(first + at_once));
            kernels.start_read(part)
        });
        Ok(PendingNumbers(parts.collect::<Result<_, _>>()?))
    }

    /// Waits for them.
    ///
    /// # Errors
    /// [`KernelError`] if the device has failed.
    pub(crate) fn finish(self, kernels: &Kernels) -> Result<Vec<f32>, KernelError> {
        let mut all = Vec::new();
        for part in self.0 {
            all.extend(numbers(&kernels.finish_read(part)?));
        }
        Ok(all)
    }
}

/// The f32 numbers that were read.
pub(crate) fn numbers(bytes: &[u8]) -> Vec<f32> {
    let words = bytes.chunks_exact(size_of::<f32>());
    words.map(bytemuck::pod_read_unaligned).collect()
}

/// Elements that `read` copies, converted from `dtype` to f32.
pub(crate) fn widened(
    dtype: DType,
    elements: usize,
    read: impl FnOnce(&mut [u8]) -> Result<(), KernelError>,
) -> Result<Vec<f32>, KernelError> {
    let mut bytes = vec![0; elements * dtype.size_in_bytes()];
    read(&mut bytes)?;
    let mut values = Vec::with_capacity(elements);
    widen(dtype.into(), &bytes, &mut values);
    Ok(values)
}
