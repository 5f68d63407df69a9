//! Moves and conversions.

use crate::executable::{Decoded, Executable, Opcodes, binary, unary};
use crate::operands::{Constant, PtxOperand, PtxOperands};

pub(crate) const OPCODES: Opcodes = &[
    // A bf16 is the upper half.
    ("cvt.f32.bf16", |o| unary(o, |a: u16| u32::from(a) << 16)),
    ("cvt.f64.f32", |o| unary(o, |a: f32| f64::from(a))),
    ("cvt.rn.bf16.f32", |o| unary(o, bf16)),
    // The first operand becomes the upper half.
    ("cvt.rn.bf16x2.f32", |o| {
        binary(o, |a: f32, b: f32| {
            u32::from(bf16(a)) << 16 | u32::from(bf16(b))
        })
    }),
    // The first operand becomes the upper byte.
    ("cvt.rn.satfinite.e4m3x2.f32", |o| {
        binary(o, |a: f32, b: f32| {
            u16::from_be_bytes([a, b].map(|of| byte(of, E4M3)))
        })
    }),
    ("cvt.rn.satfinite.e5m2x2.f32", |o| {
        binary(o, |a: f32, b: f32| {
            u16::from_be_bytes([a, b].map(|of| byte(of, E5M2)))
        })
    }),
    ("cvt.rn.f32.f64", |o| {
        unary(o, |a: f64| crate::arithmetic::canonical(a as f32))
    }),
    ("cvt.rn.f32.s32", |o| unary(o, |a: i32| a as f32)),
    ("cvt.rn.f32.u64", |o| unary(o, |a: u64| a as f32)),
    ("cvt.rn.f64.s32", |o| unary(o, |a: i32| f64::from(a))),
    ("cvt.rn.f64.u64", |o| unary(o, |a: u64| a as f64)),
    ("cvt.s32.s16", |o| unary(o, |a: i16| i32::from(a))),
    ("cvt.s64.s32", |o| unary(o, |a: i32| i64::from(a))),
    // NaN becomes 0.
    ("cvt.sat.f32.f32", |o| {
        unary(o, |a: f32| if a > 0.0 { a.min(1.0) } else { 0.0 })
    }),
    ("cvt.u16.u32", |o| unary(o, |a: u32| a as u16)),
    ("cvt.u16.u64", |o| unary(o, |a: u64| a as u16)),
    ("cvt.u32.u16", |o| unary(o, |a: u16| u32::from(a))),
    ("cvt.u32.u64", |o| unary(o, |a: u64| a as u32)),
    ("cvt.u64.u16", |o| unary(o, |a: u16| u64::from(a))),
    ("cvt.u64.u32", |o| unary(o, |a: u32| u64::from(a))),
    ("mov.b32", |o| {
        packed::<u32, u16>(
            o,
            |low, high| u32::from(high) << 16 | u32::from(low),
            |both| [both as u16, (both >> 16) as u16],
        )
    }),
    ("mov.b64", |o| {
        packed::<u64, u32>(
            o,
            |low, high| u64::from(high) << 32 | u64::from(low),
            |both| [both as u32, (both >> 32) as u32],
        )
    }),
    ("mov.f32", |o| unary(o, |a: f32| a)),
    ("mov.f64", |o| unary(o, |a: f64| a)),
    ("mov.pred", |o| {
        o.exactly(2)?;
        let (target, a) = (o.predicate_target(0)?, o.condition(1)?);
        Ok(Executable::compute(move |registers, mask| {
            let result = a.lanes(registers);
            registers.write_predicate(target, mask, result);
        }))
    }),
    ("mov.u16", |o| unary(o, |a: u16| a)),
    ("mov.u32", |o| unary(o, |a: u32| a)),
    ("mov.u64", |o| unary(o, |a: u64| a)),
];

/// The nearest bf16, ties to even; NaN becomes 0x7fff.
pub(crate) fn bf16(value: f32) -> u16 {
    if value.is_nan() {
        return 0x7fff;
    }
    let bits = value.to_bits();
    let is_odd = bits >> 16 & 1;
    ((bits + 0x7fff + is_odd) >> 16) as u16
}

/// Bits of the fraction of a float of eight bits, the exponent of its smallest normal value, and the code of its largest value.
type ByteFormat = (i32, i32, u8);
const E4M3: ByteFormat = (3, -6, 0x7e);
const E5M2: ByteFormat = (2, -14, 0x7b);

/// The nearest float of eight bits, ties to even; what is larger than all becomes the largest with its sign, and NaN the positive NaN.
fn byte(value: f32, (fraction, least, largest): ByteFormat) -> u8 {
    if value.is_nan() {
        return 0x7f;
    }
    let exponent = ((value.to_bits() >> 23 & 0xff) as i32 - 127).max(least);
    let steps = f64::from(value.abs()) / 2f64.powi(exponent - fraction);
    // Codes of larger values follow one another, so a sum that reaches the next exponent is that one's first code.
    let code = f64::from((exponent - least) << fraction) + steps.round_ties_even();
    code.min(f64::from(largest)) as u8 | u8::from(value.is_sign_negative()) << 7
}

/// A move of all bits: of a register, from two halves, or to two; the first one is the lower half.
fn packed<T: Constant, H: Constant>(
    o: &mut PtxOperands,
    join: impl Fn(H, H) -> T + Send + Sync + 'static,
    split: impl Fn(T) -> [H; 2] + Send + Sync + 'static,
) -> Decoded {
    o.exactly(2)?;
    if let PtxOperand::Vector(_) = o.operand(1)? {
        let (target, [low, high]) = (o.target::<T>(0)?, o.sources::<H, 2>(1)?);
        return Ok(Executable::compute(move |registers, mask| {
            let (low, high) = (registers.read(low), registers.read(high));
            let join = |lane: usize| join(low[lane], high[lane]);
            registers.write(target, mask, crate::operands::by_lane(join));
        }));
    }
    if let PtxOperand::Vector(_) = o.operand(0)? {
        let ([low, high], a) = (o.targets::<H, 2>(0)?, o.source::<T>(1)?);
        return Ok(Executable::compute(move |registers, mask| {
            let halves = registers.read(a).map(&split);
            registers.write(low, mask, halves.map(|[low, _]| low));
            registers.write(high, mask, halves.map(|[_, high]| high));
        }));
    }
    unary(o, |a: T| a)
}
