//! Numbers on their way to the host, while the device goes on.

use files::widen;
use kernels::{KernelError, Kernels, READING_BYTES_MAX, Reading};
use memory::{DType, In};

/// f32 numbers on their way to the host, which may not have been computed.
pub(crate) struct PendingNumbers(Vec<Reading>);

impl PendingNumbers {
    /// Sends for `numbers [n]`.
    pub(crate) fn start(kernels: &Kernels, numbers: In) -> Result<PendingNumbers, KernelError> {
        let (count, at_once) = (numbers.elements(), READING_BYTES_MAX / size_of::<f32>());
        let parts = (0..count).step_by(at_once).map(|first| {
            let part = numbers.rows(first..count.min(first + at_once));
            kernels.start_read(part)
        });
        Ok(PendingNumbers(parts.collect::<Result<_, _>>()?))
    }

    /// Whether they are here.
    pub(crate) fn have_come(&self, kernels: &Kernels) -> bool {
        self.0.iter().all(|part| kernels.has_come(part))
    }

    /// Waits for them.
    pub(crate) fn finish(self, kernels: &Kernels) -> Result<Vec<f32>, KernelError> {
        let mut all = Vec::new();
        for part in self.0 {
            widen(DType::F32.into(), &kernels.finish_read(part)?, &mut all);
        }
        Ok(all)
    }
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
