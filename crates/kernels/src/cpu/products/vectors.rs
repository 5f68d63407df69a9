//! Tiles on vector registers: AVX-512 with and without bf16, AVX2, and the baseline.

use super::multiply::{Vector, multiply};
use super::tiles::{Job, Left, Right, SIDE, Square, Tiles};
use super::words::*;
use crate::cpu::simd::Real;
use half::bf16;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// A set of instructions that work on operands widened to f32.
macro_rules! widening {
    ($name:ident, $vector:ty, $panels:literal, $transpose:path, $narrow:path) => {
        impl Tiles for $name {
            const SQUARES: usize = 2;
            const READS_ROWS: bool = false;
            const THIN: usize = 8;

            #[inline(always)]
            unsafe fn along<T: Real>(row: *const T, squares: *mut Square, line: usize) {
                // SAFETY: the caller's promise.
                unsafe { widen_along(row, squares, line) };
            }

            #[inline(always)]
            unsafe fn across<T: Real>(
                first: *const T,
                stride: usize,
                squares: *mut Square,
                line: usize,
            ) {
                // SAFETY: the caller's promise.
                unsafe { widen_across(first, stride, squares, line) };
            }

            #[inline(always)]
            unsafe fn transpose(to: *mut Square, from: *const Square) {
                // SAFETY: the caller's promise.
                unsafe { $transpose(to, from) };
            }

            #[inline(always)]
            unsafe fn narrow(to: *mut [bf16; SIDE], sums: *const [f32; SIDE]) {
                // SAFETY: the caller's promise.
                unsafe { $narrow(to, sums) };
            }

            #[inline(always)]
            unsafe fn multiply(
                sums: *mut Square,
                left: Left,
                right: Right,
                blocks: usize,
                fresh: bool,
            ) {
                // SAFETY: the caller's promise.
                unsafe {
                    multiply::<$vector, 2, $panels, { 4 * $panels }>(
                        sums, left, right, blocks, fresh,
                    )
                };
            }
        }
    };
}

/// The instructions of every processor.
pub(super) struct Baseline;

impl Vector for [f32; SIDE] {
    #[inline(always)]
    fn zero() -> Self {
        [0.0; SIDE]
    }

    #[inline(always)]
    unsafe fn load(from: *const u32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<Self>().read() }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<Self>().write(self) };
    }

    #[inline(always)]
    unsafe fn add(mut self, other: Self) -> Self {
        self.iter_mut()
            .zip(other)
            .for_each(|(sum, other)| *sum += other);
        self
    }

    #[inline(always)]
    unsafe fn add_product(mut self, left: *const u32, right: Self) -> Self {
        // SAFETY: the caller's promise.
        let left = f32::from_bits(unsafe { left.read() });
        self.iter_mut()
            .zip(right)
            .for_each(|(sum, right)| *sum += left * right);
        self
    }
}

widening!(Baseline, [f32; SIDE], 1, transpose_words, narrow_words);

/// AVX2 and fused multiplication.
#[cfg(target_arch = "x86_64")]
pub(super) struct WithAvx2;

#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct TwoOfEight([__m256; 2]);

#[cfg(target_arch = "x86_64")]
impl Vector for TwoOfEight {
    #[inline(always)]
    fn zero() -> Self {
        // SAFETY: all zeros are eight f32.
        TwoOfEight(unsafe { std::mem::zeroed() })
    }

    #[inline(always)]
    unsafe fn load(from: *const u32) -> Self {
        // SAFETY: the caller's promise.
        TwoOfEight([0, 8].map(|at| unsafe { _mm256_loadu_ps(from.wrapping_add(at).cast()) }))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u32) {
        // SAFETY: the caller's promise.
        unsafe {
            _mm256_storeu_ps(to.cast(), self.0[0]);
            _mm256_storeu_ps(to.wrapping_add(8).cast(), self.0[1]);
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller's promise.
        TwoOfEight([0, 1].map(|at| unsafe { _mm256_add_ps(self.0[at], other.0[at]) }))
    }

    #[inline(always)]
    unsafe fn add_product(self, left: *const u32, right: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let left = _mm256_set1_ps(left.cast::<f32>().read());
            TwoOfEight([0, 1].map(|at| _mm256_fmadd_ps(left, right.0[at], self.0[at])))
        }
    }
}

#[cfg(target_arch = "x86_64")]
widening!(WithAvx2, TwoOfEight, 1, transpose_avx2, narrow_words);

/// AVX-512.
#[cfg(target_arch = "x86_64")]
pub(super) struct WithAvx512;

/// AVX-512 with products of pairs of bf16.
#[cfg(target_arch = "x86_64")]
pub(super) struct WithAvx512Bf16;

#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct Sixteen(__m512);

/// As [`Sixteen`], but multiplication takes the words as pairs of bf16.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct SixteenOfPairs(__m512);

#[cfg(target_arch = "x86_64")]
macro_rules! sixteen {
    ($name:ident, |$sums:ident, $left:ident, $right:ident| $add_product:expr) => {
        impl Vector for $name {
            #[inline(always)]
            fn zero() -> Self {
                // SAFETY: all zeros are sixteen f32.
                $name(unsafe { std::mem::zeroed() })
            }

            #[inline(always)]
            unsafe fn load(from: *const u32) -> Self {
                // SAFETY: the caller's promise.
                $name(unsafe { _mm512_loadu_ps(from.cast()) })
            }

            #[inline(always)]
            unsafe fn store(self, to: *mut u32) {
                // SAFETY: the caller's promise.
                unsafe { _mm512_storeu_ps(to.cast(), self.0) };
            }

            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                // SAFETY: the caller's promise.
                $name(unsafe { _mm512_add_ps(self.0, other.0) })
            }

            #[inline(always)]
            unsafe fn add_product(self, $left: *const u32, right: Self) -> Self {
                let ($sums, $right) = (self.0, right.0);
                // SAFETY: the caller's promise.
                $name(unsafe { $add_product })
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
sixteen!(Sixteen, |sums, left, right| _mm512_fmadd_ps(
    _mm512_set1_ps(left.cast::<f32>().read()),
    right,
    sums
));

#[cfg(target_arch = "x86_64")]
sixteen!(SixteenOfPairs, |sums, left, right| _mm512_dpbf16_ps(
    sums,
    std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(left.cast::<i32>().read())),
    std::mem::transmute::<__m512, __m512bh>(right)
));

#[cfg(target_arch = "x86_64")]
widening!(WithAvx512, Sixteen, 2, transpose_avx512, narrow_avx512);

/// The instruction adds the upper half's product first. So a word's upper half comes before its lower half in the chain of
/// even places, which the first eight words are, and in that of odd places, the others.
#[cfg(target_arch = "x86_64")]
const fn pair_of_word(word: usize) -> [usize; 2] {
    let (chain, pair) = (word / 8, word % 8);
    [4 * pair + 2 + chain, 4 * pair + chain]
}

#[cfg(target_arch = "x86_64")]
impl Tiles for WithAvx512Bf16 {
    const SQUARES: usize = 1;
    const READS_ROWS: bool = false;
    const THIN: usize = 8;

    #[inline(always)]
    unsafe fn along<T: Real>(row: *const T, squares: *mut Square, line: usize) {
        const ORDER: [u16; 32] = {
            let mut order = [0; 32];
            let mut word = 0;
            while word < 16 {
                let [low, high] = pair_of_word(word);
                order[2 * word] = low as u16;
                order[2 * word + 1] = high as u16;
                word += 1;
            }
            order
        };
        // SAFETY: the caller's promise.
        unsafe {
            let order = _mm512_loadu_si512(ORDER.as_ptr().cast());
            let row = _mm512_permutexvar_epi16(order, _mm512_loadu_si512(row.cast()));
            _mm512_storeu_si512((*squares)[line].as_mut_ptr().cast(), row);
        }
    }

    #[inline(always)]
    unsafe fn across<T: Real>(first: *const T, stride: usize, squares: *mut Square, line: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let pair = pair_of_word(line).map(|place| first.wrapping_add(place * stride));
            (*squares)[line] = pairs(pair.map(|place| place.cast()));
        }
    }

    #[inline(always)]
    unsafe fn transpose(to: *mut Square, from: *const Square) {
        // SAFETY: the caller's promise.
        unsafe { transpose_avx512(to, from) };
    }

    #[inline(always)]
    unsafe fn narrow(to: *mut [bf16; SIDE], sums: *const [f32; SIDE]) {
        // SAFETY: the caller's promise.
        unsafe { narrow_avx512(to, sums) };
    }

    #[inline(always)]
    unsafe fn multiply(sums: *mut Square, left: Left, right: Right, blocks: usize, fresh: bool) {
        // SAFETY: the caller's promise.
        unsafe { multiply::<SixteenOfPairs, 1, 2, 8>(sums, left, right, blocks, fresh) };
    }
}

/// Runs jobs compiled for a set of instructions.
macro_rules! entry {
    ($name:ident, $features:literal) => {
        #[cfg(target_arch = "x86_64")]
        impl $name {
            /// # Safety
            /// The processor must have the instructions.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn run<J: Job>(job: J) {
                job.run::<$name>();
            }
        }
    };
}

entry!(WithAvx2, "avx2,fma");
entry!(WithAvx512, "avx512f,avx512bw,avx512dq,avx512vl");
entry!(
    WithAvx512Bf16,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"
);
