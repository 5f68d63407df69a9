//! Arithmetic of integers and floats: each operation is rounded as its modifier says, in IEEE's arithmetic.

use crate::executable::{Decode, Opcodes, binary, partial, ternary, ternary_lanes, unary};
use crate::operands::PtxOperands;
use crate::registers::LANES;

/// The NaN that f32 arithmetic returns.
pub(crate) const NAN: f32 = f32::from_bits(0x7fff_ffff);

pub(crate) const OPCODES: Opcodes = &[
    ("abs.f32", |o| unary(o, |a: f32| canonical(a.abs()))),
    ("add.f32", ADD),
    ("add.f64", |o| binary(o, |a: f64, b: f64| a + b)),
    ("add.rn.f32", ADD),
    ("add.s32", |o| binary(o, u32::wrapping_add)),
    ("add.s64", |o| binary(o, u64::wrapping_add)),
    ("div.rn.f32", |o| {
        binary(o, |a: f32, b: f32| canonical(a / b))
    }),
    ("div.rn.f64", |o| binary(o, |a: f64, b: f64| a / b)),
    ("div.s32", |o| partial(o, ZERO, i32_division)),
    ("div.u32", |o| partial(o, ZERO, u32::checked_div)),
    ("div.u64", |o| partial(o, ZERO, u64::checked_div)),
    ("fma.rm.f32", |o| ternary(o, fused_down)),
    ("fma.rn.f32", |o| ternary_lanes(o, fused)),
    ("fma.rn.f64", |o| {
        ternary(o, |a: f64, b, c: f64| a.mul_add(b, c))
    }),
    ("mad.lo.s32", |o| {
        ternary(o, |a: u32, b: u32, c: u32| {
            a.wrapping_mul(b).wrapping_add(c)
        })
    }),
    ("max.f32", |o| binary(o, largest)),
    ("max.f64", |o| {
        binary(o, |a: f64, b: f64| match (a.is_nan(), b.is_nan()) {
            (true, _) => b,
            (_, true) => a,
            _ if a > b || a == b && b.is_sign_negative() => a,
            _ => b,
        })
    }),
    ("max.s32", |o| binary(o, i32::max)),
    ("max.u32", |o| binary(o, u32::max)),
    ("max.u64", |o| binary(o, u64::max)),
    ("min.f32", |o| {
        binary(o, |a: f32, b: f32| canonical(-largest(-a, -b)))
    }),
    ("min.s32", |o| binary(o, i32::min)),
    ("min.u32", |o| binary(o, u32::min)),
    ("min.u64", |o| binary(o, u64::min)),
    ("mul.f32", MULTIPLY),
    ("mul.f64", |o| binary(o, |a: f64, b: f64| a * b)),
    ("mul.lo.s32", |o| binary(o, u32::wrapping_mul)),
    ("mul.lo.s64", |o| binary(o, u64::wrapping_mul)),
    ("mul.rn.f32", MULTIPLY),
    ("mul.wide.s32", |o| {
        binary(o, |a: i32, b: i32| i64::from(a) * i64::from(b))
    }),
    ("mul.wide.u16", |o| {
        binary(o, |a: u16, b: u16| u32::from(a) * u32::from(b))
    }),
    ("mul.wide.u32", |o| {
        binary(o, |a: u32, b: u32| u64::from(a) * u64::from(b))
    }),
    ("neg.f32", |o| unary(o, |a: f32| canonical(-a))),
    ("neg.s32", |o| unary(o, i32::wrapping_neg)),
    ("neg.s64", |o| unary(o, i64::wrapping_neg)),
    ("rcp.rn.f32", |o| unary(o, |a: f32| canonical(1.0 / a))),
    ("rcp.rn.f64", |o| unary(o, |a: f64| 1.0 / a)),
    ("rem.u32", |o| partial(o, ZERO, u32::checked_rem)),
    ("rem.u64", |o| partial(o, ZERO, u64::checked_rem)),
    ("sqrt.rn.f32", |o| unary(o, |a: f32| canonical(a.sqrt()))),
    ("sqrt.rn.f64", |o| unary(o, f64::sqrt)),
    ("sub.f32", SUBTRACT),
    ("sub.f64", |o| binary(o, |a: f64, b: f64| a - b)),
    ("sub.rn.f32", SUBTRACT),
    ("sub.s32", |o| binary(o, u32::wrapping_sub)),
    ("sub.s64", |o| binary(o, u64::wrapping_sub)),
    // Approximations: the nearest f32 is within the error that is documented of each.
    ("ex2.approx.f32", |o| {
        unary(o, |a: f32| approximate(a, f64::exp2))
    }),
    ("ex2.approx.ftz.f32", |o| {
        unary(o, |a: f32| flushed(approximate(flushed(a), f64::exp2)))
    }),
    ("lg2.approx.f32", |o| {
        unary(o, |a: f32| approximate(a, f64::log2))
    }),
    ("rcp.approx.ftz.f32", |o| {
        unary(o, |a: f32| flushed(canonical(1.0 / flushed(a))))
    }),
    ("rsqrt.approx.f32", |o| {
        unary(o, |a: f32| approximate(a, |a| 1.0 / a.sqrt()))
    }),
];

const ZERO: &str = "a division by zero";
const ADD: Decode = |o: &mut PtxOperands| binary(o, |a: f32, b: f32| canonical(a + b));
const SUBTRACT: Decode = |o: &mut PtxOperands| binary(o, |a: f32, b: f32| canonical(a - b));
const MULTIPLY: Decode = |o: &mut PtxOperands| binary(o, |a: f32, b: f32| canonical(a * b));

/// Replaces any NaN by the device's canonical NaN.
#[inline(always)]
pub(crate) fn canonical(value: f32) -> f32 {
    // Compares bits, because the compiler may treat all NaNs as equal.
    let bits = value.to_bits();
    let is_number = bits & 0x7fff_ffff <= f32::INFINITY.to_bits();
    f32::from_bits(if is_number { bits } else { NAN.to_bits() })
}

/// Numbers too small for a normal f32 become zeros of their sign.
fn flushed(value: f32) -> f32 {
    if value.is_subnormal() {
        return 0f32.copysign(value);
    }
    value
}

fn approximate(value: f32, f: impl Fn(f64) -> f64) -> f32 {
    canonical(f(value.into()) as f32)
}

/// The larger operand; if one is NaN, the other. +0 counts as larger than -0.
fn largest(a: f32, b: f32) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => canonical(b),
        (_, true) => a,
        _ if a > b || a == b && b.is_sign_negative() => a,
        _ => b,
    }
}

/// Rounds towards zero, and wraps where the result is too large.
fn i32_division(a: i32, b: i32) -> Option<i32> {
    (b != 0).then(|| a.wrapping_div(b))
}

/// `a b + c`, rounded once, to the nearest.
fn fused(a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the processor has both.
        return unsafe { fused_by_hardware(&a, &b, &c) };
    }
    crate::operands::by_lane(|lane| canonical(a[lane].mul_add(b[lane], c[lane])))
}

/// As [`fused`]: the same bits, without a call for each lane.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn fused_by_hardware(a: &[f32; LANES], b: &[f32; LANES], c: &[f32; LANES]) -> [f32; LANES] {
    let mut results = [0.0; LANES];
    for lane in 0..LANES {
        results[lane] = canonical(a[lane].mul_add(b[lane], c[lane]));
    }
    results
}

/// `a b + c`, rounded once, towards minus infinity.
fn fused_down(a: f32, b: f32, c: f32) -> f32 {
    // Exact: two times 24 bits fit into 53.
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = product + c;
    if !sum.is_finite() {
        return canonical(sum as f32);
    }
    // Knuth's two-sum: `sum + rest` is the exact sum.
    let of_c = sum - product;
    let rest = (product - (sum - of_c)) + (c - of_c);
    if sum == 0.0 {
        // In this rounding, exact cancellation gives -0.
        let both_positive = product.is_sign_positive() && c.is_sign_positive();
        return if both_positive { 0.0 } else { -0.0 };
    }
    let nearest = sum as f32;
    let is_above = f64::from(nearest) > sum || f64::from(nearest) == sum && rest < 0.0;
    if is_above {
        nearest.next_down()
    } else {
        nearest
    }
}
