//! Where states are stored, and how values get there.

use half::bf16;
use kernels::{KernelError, Kernels};
use memory::{Buffer, Category, DType, Memory, Out, OutOfMemory, Space};

/// The memory that states are leased from.
#[derive(Clone, Copy)]
pub(crate) struct Storage<'a> {
    pub(crate) memory: &'a Memory,
    pub(crate) space: Space,
}

impl Storage<'_> {
    /// Leases a buffer; none if it would hold nothing.
    pub(crate) fn lease(
        &self,
        name: &'static str,
        elements: usize,
        dtype: DType,
    ) -> Result<Option<Buffer>, OutOfMemory> {
        let (category, dims) = (Category::OptimizerState, [elements]);
        match self.space {
            _ if elements == 0 => return Ok(None),
            Space::Device => self.memory.lease_persistent(category, name, dims, dtype),
            Space::Host => self.memory.lease_pinned(category, name, dims, dtype),
        }
        .map(Some)
    }
}

/// Writes bytes into a state.
pub(crate) fn store(
    kernels: &dyn Kernels,
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
    kernels: &dyn Kernels,
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
