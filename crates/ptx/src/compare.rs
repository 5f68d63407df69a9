//! Comparisons. With a NaN operand, ordered ones are false and unordered ones true.

use crate::executable::{Decoded, Executable, Opcodes};
use crate::operands::{Constant, PtxOperands};
use crate::registers::LANES;

macro_rules! table {
    ($($name:literal: $type:ty, $f:expr;)*) => {
        &[$(($name, |o| compare::<$type>(o, $f)),)*]
    };
}

pub(crate) const OPCODES: Opcodes = table! {
    "setp.eq.b16": u16, |a, b| a == b;
    "setp.eq.b32": u32, |a, b| a == b;
    "setp.eq.b64": u64, |a, b| a == b;
    "setp.eq.f32": f32, |a, b| a == b;
    "setp.eq.f64": f64, |a, b| a == b;
    "setp.eq.s16": i16, |a, b| a == b;
    "setp.eq.s32": i32, |a, b| a == b;
    "setp.eq.s64": i64, |a, b| a == b;
    "setp.ge.s32": i32, |a, b| a >= b;
    "setp.ge.u32": u32, |a, b| a >= b;
    "setp.ge.u64": u64, |a, b| a >= b;
    "setp.geu.f32": f32, |a, b| a >= b || a.is_nan() || b.is_nan();
    "setp.gt.f32": f32, |a, b| a > b;
    "setp.gt.f64": f64, |a, b| a > b;
    "setp.gt.s16": i16, |a, b| a > b;
    "setp.gt.s32": i32, |a, b| a > b;
    "setp.gt.u32": u32, |a, b| a > b;
    "setp.gt.u64": u64, |a, b| a > b;
    "setp.gtu.f32": f32, |a, b| a > b || a.is_nan() || b.is_nan();
    "setp.le.s32": i32, |a, b| a <= b;
    "setp.le.u64": u64, |a, b| a <= b;
    "setp.leu.f32": f32, |a, b| a <= b || a.is_nan() || b.is_nan();
    "setp.leu.f64": f64, |a, b| a <= b || a.is_nan() || b.is_nan();
    "setp.lt.f32": f32, |a, b| a < b;
    "setp.lt.f64": f64, |a, b| a < b;
    "setp.lt.s16": i16, |a, b| a < b;
    "setp.lt.s32": i32, |a, b| a < b;
    "setp.lt.s64": i64, |a, b| a < b;
    "setp.lt.u32": u32, |a, b| a < b;
    "setp.lt.u64": u64, |a, b| a < b;
    "setp.nan.f32": f32, |a, b| a.is_nan() || b.is_nan();
    "setp.ne.b16": u16, |a, b| a != b;
    "setp.ne.b32": u32, |a, b| a != b;
    "setp.ne.b64": u64, |a, b| a != b;
    "setp.ne.s16": i16, |a, b| a != b;
    "setp.ne.s32": i32, |a, b| a != b;
    "setp.ne.s64": i64, |a, b| a != b;
    "setp.ne.u32": u32, |a, b| a != b;
    "setp.neu.f32": f32, |a, b| a != b;
    "setp.num.f32": f32, |a, b| !a.is_nan() && !b.is_nan();
};

fn compare<T: Constant>(
    o: &mut PtxOperands,
    f: impl Fn(T, T) -> bool + Send + Sync + 'static,
) -> Decoded {
    o.exactly(3)?;
    let (target, a, b) = (o.predicate_target(0)?, o.source::<T>(1)?, o.source::<T>(2)?);
    Ok(Executable::compute(move |registers, mask| {
        let (a, b) = (registers.read(a), registers.read(b));
        let holds = (0..LANES).fold(0, |holds, lane| {
            holds | u32::from(f(a[lane], b[lane])) << lane
        });
        registers.write_predicate(target, mask, holds);
    }))
}
