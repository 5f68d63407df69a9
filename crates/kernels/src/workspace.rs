//! The targets, and the constant workspace that kernels of each target lease when they are made.

use memory::{Buffer, Category, DType, Memory, OutOfMemory};

/// f32 elements in which the CPU packs operands of products with bf16, and keeps sums.
pub(crate) const CPU_WORKSPACE: usize = 512 * 1024;

/// The device whose leases and scratch sizes apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// The process's own memory.
    Cpu,
    /// A CUDA GPU.
    Cuda,
}

impl Target {
    /// The name used in settings and files.
    pub fn name(self) -> &'static str {
        match self {
            Target::Cpu => "cpu",
            Target::Cuda => "cuda",
        }
    }
}

/// The bytes that kernels of a target keep as constant workspace. `dtype` is the narrowest type of a matrix product's
/// operands.
///
/// On the CPU, operands of bf16 products are packed in this workspace. On CUDA it is the workspace of cuBLASLt.
pub fn workspace_bytes(target: Target, dtype: DType) -> u64 {
    match (target, dtype) {
        (Target::Cpu, DType::F32) => 0,
        (Target::Cpu, _) => 4 * CPU_WORKSPACE as u64,
        (Target::Cuda, _) => 32 << 20,
    }
}

/// The constant workspace of a target's kernels, if they need one.
pub(crate) fn lease_workspace(
    memory: &Memory,
    target: Target,
    dtype: DType,
) -> Result<Option<Buffer>, OutOfMemory> {
    match workspace_bytes(target, dtype) {
        0 => Ok(None),
        bytes => memory
            .lease_persistent(
                Category::Temporary,
                "kernel_workspace",
                [bytes as usize / 4],
                DType::F32,
            )
            .map(Some),
    }
}
