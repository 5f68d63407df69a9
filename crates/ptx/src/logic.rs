//! Bits: logic, shifts, fields, permutations.

use crate::executable::{Decode, Decoded, Executable, Opcodes, binary, ternary, unary};
use crate::operands::PtxOperands;
use crate::registers::{LaneMask, lanes};

pub(crate) const OPCODES: Opcodes = &[
    ("and.b16", |o| binary(o, |a: u16, b: u16| a & b)),
    ("and.b32", |o| binary(o, |a: u32, b: u32| a & b)),
    ("and.b64", |o| binary(o, |a: u64, b: u64| a & b)),
    ("and.pred", |o| predicates(o, |a, b| a & b)),
    ("bfi.b32", |o| {
        insert(o, 32, |a: u32, b, mask, at| {
            let mask = mask as u32;
            b & !mask | a.checked_shl(at).unwrap_or(0) & mask
        })
    }),
    ("bfi.b64", |o| {
        insert(o, 64, |a: u64, b, mask, at| {
            b & !mask | a.checked_shl(at).unwrap_or(0) & mask
        })
    }),
    // How far the highest one is from the highest bit.
    ("bfind.shiftamt.u32", |o| {
        unary(
            o,
            |a: u32| if a == 0 { u32::MAX } else { a.leading_zeros() },
        )
    }),
    ("brev.b32", |o| unary(o, u32::reverse_bits)),
    ("not.b32", |o| unary(o, |a: u32| !a)),
    ("not.b64", |o| unary(o, |a: u64| !a)),
    ("not.pred", |o| {
        o.exactly(2)?;
        let (target, a) = (o.predicate_target(0)?, o.condition(1)?);
        Ok(Executable::compute(move |registers, mask| {
            let result = !a.lanes(registers);
            registers.write_predicate(target, mask, result);
        }))
    }),
    ("or.b16", |o| binary(o, |a: u16, b: u16| a | b)),
    ("or.b32", |o| binary(o, |a: u32, b: u32| a | b)),
    ("or.b64", |o| binary(o, |a: u64, b: u64| a | b)),
    ("or.pred", |o| predicates(o, |a, b| a | b)),
    ("popc.b32", |o| unary(o, u32::count_ones)),
    ("prmt.b32", |o| ternary(o, permuted)),
    // Shifts by the width or more leave nothing, or the sign.
    ("shl.b16", |o| {
        binary(o, |a: u16, by: u32| a.checked_shl(by).unwrap_or(0))
    }),
    ("shl.b32", |o| {
        binary(o, |a: u32, by: u32| a.checked_shl(by).unwrap_or(0))
    }),
    ("shl.b64", |o| {
        binary(o, |a: u64, by: u32| a.checked_shl(by).unwrap_or(0))
    }),
    ("shr.s32", |o| binary(o, |a: i32, by: u32| a >> by.min(31))),
    ("shr.u16", |o| {
        binary(o, |a: u16, by: u32| a.checked_shr(by).unwrap_or(0))
    }),
    ("shr.u32", |o| {
        binary(o, |a: u32, by: u32| a.checked_shr(by).unwrap_or(0))
    }),
    ("shr.u64", |o| {
        binary(o, |a: u64, by: u32| a.checked_shr(by).unwrap_or(0))
    }),
    ("xor.b32", |o| binary(o, |a: u32, b: u32| a ^ b)),
    ("xor.b64", |o| binary(o, |a: u64, b: u64| a ^ b)),
    ("xor.pred", |o| predicates(o, |a, b| a ^ b)),
    ("selp.b16", SELECT_16),
    ("selp.b32", SELECT_32),
    ("selp.b64", SELECT_64),
    ("selp.f32", |o| select::<f32>(o)),
    ("selp.f64", |o| select::<f64>(o)),
    ("selp.u16", SELECT_16),
    ("selp.u32", SELECT_32),
    ("selp.u64", SELECT_64),
];

const SELECT_16: Decode = |o: &mut PtxOperands| select::<u16>(o);
const SELECT_32: Decode = |o: &mut PtxOperands| select::<u32>(o);
const SELECT_64: Decode = |o: &mut PtxOperands| select::<u64>(o);

fn predicates(
    o: &mut PtxOperands,
    f: impl Fn(LaneMask, LaneMask) -> LaneMask + Send + Sync + 'static,
) -> Decoded {
    o.exactly(3)?;
    let (target, a, b) = (o.predicate_target(0)?, o.condition(1)?, o.condition(2)?);
    Ok(Executable::compute(move |registers, mask| {
        let result = f(a.lanes(registers), b.lanes(registers));
        registers.write_predicate(target, mask, result);
    }))
}

/// `d, a, b, p`: `a` where the predicate holds, or else `b`.
fn select<T: crate::operands::Constant>(o: &mut PtxOperands) -> Decoded {
    o.exactly(4)?;
    let (target, a, b) = (o.target::<T>(0)?, o.source::<T>(1)?, o.source::<T>(2)?);
    let condition = o.condition(3)?;
    Ok(Executable::compute(move |registers, mask| {
        let holds = condition.lanes(registers);
        let (a, b) = (registers.read(a), registers.read(b));
        let select = |lane: usize| match holds >> lane & 1 {
            1 => a[lane],
            _ => b[lane],
        };
        registers.write(target, mask, crate::operands::by_lane(select));
    }))
}

/// `f, a, b, c, d`: `b` with `d` bits from bit `c` on taken from `a`. `f` is told the bits that are replaced.
fn insert<T: crate::operands::Constant>(
    o: &mut PtxOperands,
    width: u32,
    f: impl Fn(T, T, u64, u32) -> T + Send + Sync + 'static,
) -> Decoded {
    o.exactly(5)?;
    let (target, a, b) = (o.target::<T>(0)?, o.source::<T>(1)?, o.source::<T>(2)?);
    let (position, length) = (o.source::<u32>(3)?, o.source::<u32>(4)?);
    Ok(Executable::access(move |warp, _, mask| {
        for lane in lanes(mask) {
            let registers = &mut warp.registers;
            // Both count in their lowest eight bits.
            let at = registers.get(position, lane) & 0xff;
            let end = width.min(at + (registers.get(length, lane) & 0xff));
            let below = |bit: u32| 1u64.checked_shl(bit).map_or(u64::MAX, |one| one - 1);
            let replaced = below(end) & !below(at);
            let result = f(registers.get(a, lane), registers.get(b, lane), replaced, at);
            registers.set(target, lane, result);
        }
        Ok(())
    }))
}

/// Each nibble of the selector chooses one of the eight bytes of `b` over `a`; its highest bit spreads the byte's sign.
fn permuted(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = (u64::from(b) << 32 | u64::from(a)).to_le_bytes();
    let chosen = |place: usize| {
        let nibble = selector >> (4 * place) & 0xf;
        let byte = bytes[(nibble & 7) as usize];
        match nibble >> 3 {
            1 => (byte as i8 >> 7) as u8,
            _ => byte,
        }
    };
    u32::from_le_bytes(std::array::from_fn(chosen))
}
