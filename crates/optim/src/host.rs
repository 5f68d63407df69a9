//! Copies values from the host into states, wherever these live.

use files::narrow;
use kernels::{Kernels, Result};
use memory::{DType, Out, Space};

/// Writes bytes into a state.
pub(crate) fn store(kernels: &Kernels, space: Space, out: Out, bytes: &[u8]) -> Result {
    match space {
        Space::Device => kernels.upload(out, bytes),
        Space::Host => {
            out.cast(DType::U8).slice_mut::<u8>().copy_from_slice(bytes);
            Ok(())
        }
    }
}

/// Writes f32 values into a tensor of f32, or of bf16 with rounding to nearest.
pub(crate) fn store_f32(kernels: &Kernels, space: Space, out: Out, values: &[f32]) -> Result {
    let dtype = out.dtype().into();
    store(kernels, space, out, &narrow(values, dtype))
}
