//! The sets of instructions that multiply bf16.

use super::tiles::Job;
use super::vectors::Baseline;
#[cfg(target_arch = "x86_64")]
use super::vectors::{WithAvx2, WithAvx512, WithAvx512Bf16};
use memory::{DType, In};

/// Instructions that multiply matrices of bf16, best first. All sum in the same order, so all give the same bits. The
/// exception: the first two treat products and sums below the least normal f32 (1.2e-38) as zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Instructions {
    /// Intel's matrix extension: tiles of 16 rows by 32.
    Amx,
    /// AVX-512 with products of pairs of bf16 (Intel since Cooper Lake, AMD since Zen 4).
    Avx512Bf16,
    /// AVX-512, on operands widened to f32.
    Avx512,
    /// AVX2 and fused multiplication, on operands widened to f32.
    Avx2,
    /// Instructions of every processor, on operands widened to f32.
    Baseline,
}

impl Instructions {
    /// All of them, best first.
    pub const ALL: [Instructions; 5] = [
        Instructions::Amx,
        Instructions::Avx512Bf16,
        Instructions::Avx512,
        Instructions::Avx2,
        Instructions::Baseline,
    ];

    /// The best ones that this processor has.
    pub fn best() -> Instructions {
        let mut all = Instructions::ALL.into_iter();
        all.find(|instructions| instructions.are_here())
            .expect("every processor has the baseline")
    }

    /// Whether this processor has them and the operating system permits them.
    pub fn are_here(self) -> bool {
        match self {
            Instructions::Amx => detection::has_amx(),
            Instructions::Avx512Bf16 => detection::has_avx512_bf16(),
            Instructions::Avx512 => detection::has_avx512(),
            Instructions::Avx2 => detection::has_avx2(),
            Instructions::Baseline => true,
        }
    }

    /// The instructions for these operands, of which codes are packed as bf16: if some are f32, `self` if it widens operands, otherwise the best that do.
    pub(super) fn of(self, operands: [In; 2]) -> Instructions {
        let is_bf16 = |x: &In| x.dtype() == DType::BF16 || x.dtype().is_fp8();
        let are_bf16 = operands.iter().all(is_bf16);
        match self {
            Instructions::Amx | Instructions::Avx512Bf16 if !are_bf16 => Instructions::Avx512,
            others => others,
        }
    }

    /// Squares of a tile: [`Tiles::SQUARES`](super::tiles::Tiles::SQUARES).
    pub(super) fn squares(self) -> usize {
        match self {
            Instructions::Amx | Instructions::Avx512Bf16 => 1,
            _ => 2,
        }
    }

    /// Runs a job that was compiled for these instructions.
    pub(super) fn run(self, job: impl Job) {
        debug_assert!(self.are_here());
        match self {
            // SAFETY: `Cpu` has only instructions that this processor has.
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Instructions::Amx => unsafe { super::amx::run(job) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512Bf16 => unsafe { WithAvx512Bf16::run(job) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => unsafe { WithAvx512::run(job) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => unsafe { WithAvx2::run(job) },
            _ => job.run::<Baseline>(),
        }
    }
}

/// Detects what the processor and its operating system offer.
#[cfg(target_arch = "x86_64")]
mod detection {
    pub(super) use crate::cpu::simd::has_avx512;
    use std::arch::is_x86_feature_detected;

    pub(super) fn has_avx2() -> bool {
        crate::cpu::simd::has_avx2() && is_x86_feature_detected!("fma")
    }

    pub(super) fn has_avx512_bf16() -> bool {
        has_avx512() && is_x86_feature_detected!("avx512bf16")
    }

    #[cfg(target_os = "linux")]
    pub(super) fn has_amx() -> bool {
        has_avx512() && super::super::amx::is_permitted()
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn has_amx() -> bool {
        false
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod detection {
    pub(super) fn has_amx() -> bool {
        false
    }

    pub(super) fn has_avx512_bf16() -> bool {
        false
    }

    pub(super) fn has_avx512() -> bool {
        false
    }

    pub(super) fn has_avx2() -> bool {
        false
    }
}
