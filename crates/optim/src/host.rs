//! Values from the host into states, wherever these are.

use half::bf16;
use kernels::{KernelError, Kernels};
use memory::{DType, Out, Space};

/// Writes bytes into a state.
pub(crate) fn store(
    kernels: &Kernels,
    space: Space,
    out: Out,
    bytes: &[u8],
) -> Result<(), KernelError> {
    match space {
        Space::Device => kernels.upload(out, bytes),
        Space::Host => {
            out.cast(DType::U8).slice_mut::<u8>().copy_from_slice(bytes);
            Ok(())
        }
    }
}

/// Writes f32 values into an f32 tensor, or rounded to nearest into one of bf16.
pub(crate) fn store_f32(
    kernels: &Kernels,
    space: Space,
    out: Out,
    values: &[f32],
) -> Result<(), KernelError> {
    if out.dtype() == DType::F32 {
        return store(kernels, space, out, bytemuck::cast_slice(values));
    }
    let rounded: Vec<bf16> = values.iter().map(|value| bf16::from_f32(*value)).collect();
    store(kernels, space, out, bytemuck::cast_slice(&rounded))
}
