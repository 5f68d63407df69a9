//! Kinds of kernels: some operations have others for Hopper.

use super::{Cuda, Driver};
use crate::Kernels;

choices::choices! {
    /// Which kernels compute an operation that has several kinds. Kinds add up in other orders, so their bits differ. They
    /// lease the same memory.
    KernelKind {
        /// Kernels for compute capability 8.0 and later.
        Sm80 = "sm80",
        /// Kernels with instructions that only compute capability 9.0 has.
        Sm90 = "sm90",
    }
}

impl<D: Driver> Kernels<Cuda<D>> {
    /// Computes flash attention in bf16 by kernels of this kind, in place of [`KernelKind::Sm80`]. The device has to run them. Heads
    /// of 32 and less have one kind, and so do capped scores.
    pub fn with_attention_by(mut self, kind: KernelKind) -> Kernels<Cuda<D>> {
        self.backend.attention = kind;
        self
    }

    /// Computes products of experts in bf16 by kernels of this kind, in place of [`KernelKind::Sm80`]. The device has to run
    /// them.
    pub fn with_experts_by(mut self, kind: KernelKind) -> Kernels<Cuda<D>> {
        self.backend.experts = kind;
        self
    }

    /// Lets blocks for Hopper compute several tiles of products of experts as soon as so many blocks have one each, in place of
    /// [`super::BLOCKS_ENOUGH`]. So small shapes are computed as large ones are, with the same bits.
    pub fn with_blocks_enough(mut self, blocks: usize) -> Kernels<Cuda<D>> {
        self.backend.blocks_enough = blocks;
        self
    }
}
