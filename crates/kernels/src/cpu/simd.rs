//! Tools for fast loops over floats whose bits do not depend on the instruction set.
//!
//! [`vectorized!`] compiles one body for AVX-512, AVX2 and the baseline and chooses at run time. Sums run in
//! [`LANES`] explicit lanes, and products are never fused with additions, so every instruction set gives the same
//! bits.

use half::bf16;
use memory::Element;

/// Parallel accumulators of a sum.
pub(super) const LANES: usize = 16;

/// Elements of a flat tensor that one task works on.
pub(super) const CHUNK: usize = 16 * 1024;

/// f32 or bf16, computed with in f32.
pub(super) trait Real: Element {
    /// Whether f32 arithmetic needs a widened copy.
    const WIDEN: bool;

    fn widen(self) -> f32;

    fn narrow(value: f32) -> Self;
}

impl Real for f32 {
    const WIDEN: bool = false;

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> f32 {
        value
    }
}

impl Real for bf16 {
    const WIDEN: bool = true;

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    /// Rounds to nearest, ties to even; NaN stays NaN.
    #[inline(always)]
    fn narrow(value: f32) -> bf16 {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet_nan = (bits >> 16) | 0x40;
        bf16::from_bits(if value.is_nan() { quiet_nan } else { rounded } as u16)
    }
}

/// Whether the processor has the parts of AVX-512 that loops are compiled for.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) fn has_avx512() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512bw")
        && std::arch::is_x86_feature_detected!("avx512dq")
        && std::arch::is_x86_feature_detected!("avx512vl")
}

/// Whether the processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) fn has_avx2() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
}

/// Defines functions whose body is compiled for AVX-512, AVX2 and the baseline, chosen at run time.
macro_rules! vectorized {
    ($(
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident $(<$($real:ident: $bound:path),+>)? ($($argument:ident: $kind:ty),* $(,)?)
            $(-> $result:ty)? $body:block
    )*) => {$(
        $(#[$attribute])*
        $visibility fn $name $(<$($real: $bound),+>)? ($($argument: $kind),*) $(-> $result)? {
            #[inline(always)]
            fn body $(<$($real: $bound),+>)? ($($argument: $kind),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512 $(<$($real: $bound),+>)? ($($argument: $kind),*) $(-> $result)? {
                    body($($argument),*)
                }

                #[target_feature(enable = "avx2")]
                fn avx2 $(<$($real: $bound),+>)? ($($argument: $kind),*) $(-> $result)? {
                    body($($argument),*)
                }

                if $crate::cpu::simd::has_avx512() {
                    // SAFETY: the processor has these features.
                    return unsafe { avx512($($argument),*) };
                }
                if $crate::cpu::simd::has_avx2() {
                    // SAFETY: the processor has this feature.
                    return unsafe { avx2($($argument),*) };
                }
            }
            body($($argument),*)
        }
    )*};
}
pub(super) use vectorized;

/// e^x within 2 ulp for x in [-87, 88], clamped outside; NaN stays NaN.
///
/// Range reduction by Cody and Waite, then the Taylor polynomial of degree 7 on |r| <= ln(2) / 2.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Adding and subtracting this rounds to the nearest integer, which its low bits then hold.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let mut sum = 1.0 / 5040.0;
    sum = sum * r + 1.0 / 720.0;
    sum = sum * r + 1.0 / 120.0;
    sum = sum * r + 1.0 / 24.0;
    sum = sum * r + 1.0 / 6.0;
    sum = sum * r + 0.5;
    sum = sum * (r * r) + (r + 1.0);
    let exponent = shifted
        .to_bits()
        .wrapping_sub(ROUND.to_bits())
        .wrapping_add(127);
    sum * f32::from_bits(exponent.wrapping_shl(23))
}

/// tanh(x) within 4 ulp; NaN stays NaN. Below 0.625 a polynomial of Cephes, since the other formula cancels there.
#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    let square = x * x;
    let mut sum = -5.704_988_7e-3;
    sum = sum * square + 2.063_909e-2;
    sum = sum * square - 5.373_971_6e-2;
    sum = sum * square + 1.333_144_2e-1;
    sum = sum * square - 3.333_328e-1;
    let near = x + x * square * sum;
    let far = (1.0 - 2.0 / (exp(2.0 * x.abs()) + 1.0)).copysign(x);
    if x.abs() < 0.625 { near } else { far }
}

/// The lanes of every slice at `start`. Arrays of fixed size avoid bounds checks in loops over lanes. Loops are plain
/// because `map` on arrays was not inlined here.
#[inline(always)]
fn lanes_at<T: Real, const N: usize>(slices: &[&[T]; N], start: usize) -> [[f32; LANES]; N] {
    let mut lanes = [[0.0; LANES]; N];
    for (lanes, slice) in lanes.iter_mut().zip(slices) {
        let chunk: &[T; LANES] = slice[start..start + LANES]
            .try_into()
            .expect("the range has LANES elements");
        for lane in 0..LANES {
            lanes[lane] = chunk[lane].widen();
        }
    }
    lanes
}

/// Sum of `term` over the elements of slices of one length, in fixed lanes.
#[inline(always)]
pub(super) fn lane_sum<T: Real, const N: usize>(
    slices: [&[T]; N],
    term: impl Fn([f32; N]) -> f32,
) -> f32 {
    let n = slices[0].len();
    let mut sums = [0.0f32; LANES];
    let whole = n / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        let lanes = lanes_at(&slices, start);
        for lane in 0..LANES {
            let mut values = [0.0; N];
            for slice in 0..N {
                values[slice] = lanes[slice][lane];
            }
            sums[lane] += term(values);
        }
    }
    for (lane, index) in (whole..n).enumerate() {
        let mut values = [0.0; N];
        for slice in 0..N {
            values[slice] = slices[slice][index].widen();
        }
        sums[lane] += term(values);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
        width /= 2;
    }
    sums[0]
}

/// Largest element; negative infinity for an empty slice. NaN is ignored.
#[inline(always)]
pub(super) fn lane_max<T: Real>(x: &[T]) -> f32 {
    let mut largest = [f32::NEG_INFINITY; LANES];
    let whole = x.len() / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        let [lanes] = lanes_at(&[x], start);
        for lane in 0..LANES {
            largest[lane] = if lanes[lane] > largest[lane] {
                lanes[lane]
            } else {
                largest[lane]
            };
        }
    }
    let tail = x[whole..].iter().map(|value| value.widen());
    tail.chain(largest).fold(f32::NEG_INFINITY, f32::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp() {
        for step in 0..=1_750_000 {
            let x = -87.0 + step as f32 * 1e-4;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(
                error < 2.0 * f64::from(f32::EPSILON),
                "exp({x}): relative error {error}"
            );
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(f32::NEG_INFINITY) < 1e-37 && exp(f32::INFINITY) > 1e38);
    }

    #[test]
    fn tanh_is_within_four_ulp() {
        for step in -200_000..=200_000 {
            let x = step as f32 * 1e-4;
            let exact = f64::from(x).tanh();
            let error = (f64::from(tanh(x)) - exact).abs();
            let ulp = f64::from(f32::EPSILON) * exact.abs();
            assert!(error <= 4.0 * ulp, "tanh({x}): {error} off");
        }
        assert!(tanh(f32::NAN).is_nan());
        let ends = [f32::NEG_INFINITY, f32::INFINITY].map(tanh);
        assert_eq!(ends, [-1.0, 1.0]);
    }

    #[test]
    fn bf16_rounds_as_the_half_crate_does() {
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits((u32::from(high) << 16) | low);
                let (ours, theirs) = (<bf16 as Real>::narrow(value), bf16::from_f32(value));
                assert!(
                    ours == theirs || (ours.is_nan() && theirs.is_nan()),
                    "{value}"
                );
                assert!(ours.widen() == theirs.to_f32() || ours.is_nan());
            }
        }
    }

    #[test]
    fn sums_and_maxima_cover_every_tail() {
        for n in 0..70 {
            let values: Vec<f32> = (0..n).map(|value| value as f32).collect();
            let sum = lane_sum([&values, &values], |[a, b]| a + b);
            assert_eq!(sum, (n * n.max(1) - n) as f32);
            let expected = if n == 0 {
                f32::NEG_INFINITY
            } else {
                (n - 1) as f32
            };
            assert_eq!(lane_max(&values), expected);
        }
    }
}
