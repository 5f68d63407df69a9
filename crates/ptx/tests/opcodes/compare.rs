//! Comparisons: of each, a pair in either order, and an equal pair; of floats also what is no number.

use crate::harness::Value::{D, F, H, L, P, U};
use crate::harness::{Case, Value, case};

/// The results of a comparison of two numbers in either order, and of equal ones.
struct Says {
    less: bool,
    equal: bool,
    greater: bool,
}

fn says(name: &str) -> Says {
    let [less, equal, greater] = match name {
        "eq" => [false, true, false],
        "ne" | "neu" => [true, false, true],
        "lt" => [true, false, false],
        "le" | "leu" => [true, true, false],
        "gt" | "gtu" => [false, false, true],
        "ge" | "geu" => [false, true, true],
        "num" => [true, true, true],
        "nan" => [false, false, false],
        other => panic!("{other}"),
    };
    Says {
        less,
        equal,
        greater,
    }
}

pub fn table() -> Vec<Case> {
    let opcodes = [
        "setp.eq.b16",
        "setp.eq.b32",
        "setp.eq.b64",
        "setp.eq.f32",
        "setp.eq.f64",
        "setp.eq.s16",
        "setp.eq.s32",
        "setp.eq.s64",
        "setp.ge.s32",
        "setp.ge.u32",
        "setp.ge.u64",
        "setp.geu.f32",
        "setp.gt.f32",
        "setp.gt.f64",
        "setp.gt.s16",
        "setp.gt.s32",
        "setp.gt.u32",
        "setp.gt.u64",
        "setp.gtu.f32",
        "setp.le.s32",
        "setp.le.u64",
        "setp.leu.f32",
        "setp.leu.f64",
        "setp.lt.f32",
        "setp.lt.f64",
        "setp.lt.s16",
        "setp.lt.s32",
        "setp.lt.s64",
        "setp.lt.u32",
        "setp.lt.u64",
        "setp.nan.f32",
        "setp.ne.b16",
        "setp.ne.b32",
        "setp.ne.b64",
        "setp.ne.s16",
        "setp.ne.s32",
        "setp.ne.s64",
        "setp.ne.u32",
        "setp.neu.f32",
        "setp.num.f32",
    ];
    opcodes.map(compare).into()
}

fn compare(opcode: &'static str) -> Case {
    let parts: Vec<&str> = opcode.split('.').collect();
    let Says {
        less,
        equal,
        greater,
    } = says(parts[1]);
    // Of the signed types -1 is the smaller one, of the unsigned ones the larger.
    let [low, high]: [Value; 2] = match parts[2] {
        "b32" | "u32" => [U(1), U(u32::MAX)],
        "s32" => [U(u32::MAX), U(1)],
        "b64" | "u64" => [L(1), L(u64::MAX)],
        "s64" => [L(u64::MAX), L(1)],
        "b16" => [H(1), H(u16::MAX)],
        "s16" => [H(u16::MAX), H(1)],
        "f32" => [F(-2.0), F(1.0)],
        "f64" => [D(-2.0), D(1.0)],
        other => panic!("{other}"),
    };
    let mut rows = vec![
        ([low, high], P(less)),
        ([high, low], P(greater)),
        ([high, high], P(equal)),
    ];
    if parts[2] == "f32" {
        // Names that end in u, and `nan`, are true where the operands have no order.
        let unordered = parts[1].ends_with('u') || parts[1] == "nan";
        rows.push(([F(f32::NAN), F(1.0)], P(unordered)));
        rows.push(([F(1.0), F(f32::NAN)], P(unordered)));
        rows.push(([F(-0.0), F(0.0)], P(equal)));
    }
    if parts[2] == "f64" {
        rows.push(([D(f64::NAN), D(1.0)], P(parts[1].ends_with('u'))));
        rows.push(([D(-0.0), D(0.0)], P(equal)));
    }
    case(opcode, &rows)
}
