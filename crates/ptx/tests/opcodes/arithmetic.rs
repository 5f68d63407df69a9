//! Arithmetic. The values are chosen where roundings, signs, overflows and what is no number tell operations apart.

use crate::harness::Value::{D, F, H, L, U};
use crate::harness::{Case, Value, case};

/// The NaN that operations of f32 return.
const NAN: Value = F(f32::from_bits(0x7fff_ffff));
const INF: f32 = f32::INFINITY;
/// The least numbers above 1.
const NEXT: f32 = 1.0 + f32::EPSILON;
const NEXT_64: f64 = 1.0 + f64::EPSILON;
/// Half of the distance between 1 and its successor.
const HALF: f32 = f32::EPSILON / 2.0;

fn i(value: i32) -> Value {
    U(value as u32)
}

fn l(value: i64) -> Value {
    L(value as u64)
}

pub fn table() -> Vec<Case> {
    let mut cases = floats();
    cases.extend(integers());
    cases.extend(approximations());
    cases
}

fn floats() -> Vec<Case> {
    let subnormal = f32::from_bits(3);
    let add = [
        ([F(1.5), F(2.25)], F(3.75)),
        // A tie goes to the even neighbour; what is above does not.
        ([F(1.0), F(HALF)], F(1.0)),
        ([F(NEXT), F(HALF)], F(NEXT + f32::EPSILON)),
        ([F(1.0), F(HALF * 1.5)], F(NEXT)),
        ([F(INF), F(-INF)], NAN),
        ([F(f32::NAN), F(1.0)], NAN),
        ([F(f32::MAX), F(f32::MAX)], F(INF)),
        // Subnormals are kept.
        ([F(subnormal), F(subnormal)], F(f32::from_bits(6))),
        ([F(-0.0), F(0.0)], F(0.0)),
        ([F(-0.0), F(-0.0)], F(-0.0)),
    ];
    let subtract = [
        ([F(1.5), F(2.25)], F(-0.75)),
        ([F(1.0), F(HALF / 2.0)], F(1.0)),
        ([F(INF), F(INF)], NAN),
        ([F(1.0), F(1.0)], F(0.0)),
    ];
    let multiply = [
        ([F(1.5), F(-2.5)], F(-3.75)),
        ([F(NEXT), F(NEXT)], F(1.0 + 2.0 * f32::EPSILON)),
        (
            [F(f32::MIN_POSITIVE), F(0.5)],
            F(f32::from_bits(0x0040_0000)),
        ),
        ([F(0.0), F(INF)], NAN),
        ([F(f32::MAX), F(2.0)], F(INF)),
        ([F(-0.0), F(3.0)], F(-0.0)),
    ];
    // `a b` is 1 + 2 eps + eps^2: only a fused operation sees the last term.
    let eps = f32::EPSILON;
    let fused = [
        ([F(2.0), F(3.0), F(4.0)], F(10.0)),
        ([F(NEXT), F(NEXT), F(-1.0 - 2.0 * eps)], F(eps * eps)),
        ([F(0.0), F(INF), F(1.0)], NAN),
        ([F(1.0), F(HALF), F(1.0)], F(1.0)),
        ([F(1.0), F(-1.0), F(1.0)], F(0.0)),
    ];
    let down = [
        ([F(2.0), F(3.0), F(4.0)], F(10.0)),
        // Everything that lies between two f32 goes down, however little is missing to the upper.
        ([F(1.0), F(HALF * 1.5), F(1.0)], F(1.0)),
        ([F(-1.0), F(HALF * 0.5), F(-1.0)], F(-NEXT)),
        ([F(1.0), F(-1e-30), F(1.0)], F(1.0 - HALF)),
        ([F(1e-30), F(1e-30), F(-1.0)], F(-1.0)),
        ([F(-1e-30), F(1e-30), F(-1.0)], F(-NEXT)),
        // A sum that cancels gives -0.
        ([F(1.0), F(-1.0), F(1.0)], F(-0.0)),
        ([F(0.0), F(1.0), F(0.0)], F(0.0)),
        ([F(f32::MAX), F(2.0), F(0.0)], F(f32::MAX)),
        ([F(-f32::MAX), F(2.0), F(0.0)], F(-INF)),
        ([F(INF), F(0.0), F(0.0)], NAN),
    ];
    let largest = [
        ([F(1.0), F(2.0)], F(2.0)),
        ([F(-1.0), F(f32::NAN)], F(-1.0)),
        ([F(f32::NAN), F(-1.0)], F(-1.0)),
        ([F(f32::NAN), F(f32::NAN)], NAN),
        ([F(-0.0), F(0.0)], F(0.0)),
        ([F(0.0), F(-0.0)], F(0.0)),
    ];
    let smallest = [
        ([F(1.0), F(2.0)], F(1.0)),
        ([F(1.0), F(f32::NAN)], F(1.0)),
        ([F(f32::NAN), F(f32::NAN)], NAN),
        ([F(-0.0), F(0.0)], F(-0.0)),
        ([F(0.0), F(-0.0)], F(-0.0)),
    ];
    let third = F(f32::from_bits(0x3eaa_aaab));
    let third_64 = D(f64::from_bits(0x3fd5_5555_5555_5555));
    vec![
        case(
            "abs.f32",
            &[
                ([F(-1.5)], F(1.5)),
                ([F(-0.0)], F(0.0)),
                ([F(-INF)], F(INF)),
            ],
        ),
        case("add.f32", &add),
        case("add.rn.f32", &add),
        case("sub.f32", &subtract),
        case("sub.rn.f32", &subtract),
        case("mul.f32", &multiply),
        case("mul.rn.f32", &multiply),
        case("fma.rn.f32", &fused),
        case("fma.rm.f32", &down),
        case("max.f32", &largest),
        case("min.f32", &smallest),
        case("neg.f32", &[([F(1.5)], F(-1.5)), ([F(0.0)], F(-0.0))]),
        case(
            "div.rn.f32",
            &[
                ([F(1.0), F(3.0)], third),
                ([F(1.0), F(0.0)], F(INF)),
                ([F(-1.0), F(0.0)], F(-INF)),
                ([F(0.0), F(0.0)], NAN),
                (
                    [F(f32::MIN_POSITIVE), F(2.0)],
                    F(f32::from_bits(0x0040_0000)),
                ),
            ],
        ),
        case(
            "rcp.rn.f32",
            &[([F(3.0)], third), ([F(-0.0)], F(-INF)), ([F(INF)], F(0.0))],
        ),
        case(
            "sqrt.rn.f32",
            &[
                ([F(2.0)], F(f32::from_bits(0x3fb5_04f3))),
                ([F(-1.0)], NAN),
                ([F(-0.0)], F(-0.0)),
            ],
        ),
        case(
            "add.f64",
            &[
                ([D(1.0), D(f64::EPSILON / 2.0)], D(1.0)),
                ([D(1.5), D(2.0)], D(3.5)),
            ],
        ),
        case("sub.f64", &[([D(1.0), D(0.25)], D(0.75))]),
        case(
            "mul.f64",
            &[([D(NEXT_64), D(NEXT_64)], D(1.0 + 2.0 * f64::EPSILON))],
        ),
        case(
            "fma.rn.f64",
            &[(
                [D(NEXT_64), D(NEXT_64), D(-1.0 - 2.0 * f64::EPSILON)],
                D(f64::EPSILON * f64::EPSILON),
            )],
        ),
        case("div.rn.f64", &[([D(1.0), D(3.0)], third_64)]),
        case(
            "rcp.rn.f64",
            &[([D(3.0)], third_64), ([D(0.0)], D(f64::INFINITY))],
        ),
        case(
            "sqrt.rn.f64",
            &[([D(2.0)], D(f64::from_bits(0x3ff6_a09e_667f_3bcd)))],
        ),
        case(
            "max.f64",
            &[
                ([D(1.0), D(2.0)], D(2.0)),
                ([D(f64::NAN), D(2.0)], D(2.0)),
                ([D(2.0), D(f64::NAN)], D(2.0)),
                ([D(-0.0), D(0.0)], D(0.0)),
            ],
        ),
    ]
}

fn integers() -> Vec<Case> {
    vec![
        case(
            "add.s32",
            &[([i(i32::MAX), i(1)], i(i32::MIN)), ([i(-3), i(5)], i(2))],
        ),
        case(
            "add.s64",
            &[([l(i64::MAX), l(1)], l(i64::MIN)), ([l(-3), l(5)], l(2))],
        ),
        case(
            "sub.s32",
            &[([i(i32::MIN), i(1)], i(i32::MAX)), ([i(3), i(5)], i(-2))],
        ),
        case("sub.s64", &[([l(3), l(5)], l(-2))]),
        case("neg.s32", &[([i(7)], i(-7)), ([i(i32::MIN)], i(i32::MIN))]),
        case("neg.s64", &[([l(7)], l(-7))]),
        case(
            "mul.lo.s32",
            &[
                ([i(-3), i(5)], i(-15)),
                ([U(0x1_0001), U(0x1_0001)], U(0x2_0001)),
            ],
        ),
        case(
            "mul.lo.s64",
            &[
                ([l(-3), l(5)], l(-15)),
                ([L(1 << 40), L((1 << 30) + 1)], L(1 << 40)),
            ],
        ),
        case(
            "mul.wide.s32",
            &[
                ([i(-1), i(2)], l(-2)),
                ([i(i32::MIN), i(i32::MIN)], l(1 << 62)),
            ],
        ),
        case("mul.wide.u16", &[([H(0xffff), H(2)], U(0x1_fffe))]),
        case("mul.wide.u32", &[([i(-1), i(2)], L(0x1_ffff_fffe))]),
        case(
            "mad.lo.s32",
            &[
                ([i(-3), i(5), i(20)], i(5)),
                ([U(1 << 31), U(2), U(9)], U(9)),
            ],
        ),
        case("div.s32", &[([i(-7), i(2)], i(-3)), ([i(7), i(-2)], i(-3))]),
        case(
            "div.u32",
            &[([i(-1), i(2)], U(0x7fff_ffff)), ([U(7), U(2)], U(3))],
        ),
        case("div.u64", &[([l(-1), L(2)], L(u64::MAX / 2))]),
        case("rem.u32", &[([U(7), U(4)], U(3)), ([i(-1), U(10)], U(5))]),
        case("rem.u64", &[([L(7), L(4)], L(3))]),
        case("max.s32", &[([i(-1), i(1)], i(1))]),
        case("max.u32", &[([i(-1), i(1)], i(-1))]),
        case("max.u64", &[([l(-1), l(1)], l(-1)), ([L(3), L(2)], L(3))]),
        case("min.s32", &[([i(-1), i(1)], i(-1))]),
        case("min.u32", &[([i(-1), i(1)], i(1))]),
        case("min.u64", &[([l(-1), l(1)], l(1))]),
    ]
}

/// At points where the exact result is an f32; the interpreter returns the nearest f32.
fn approximations() -> Vec<Case> {
    let subnormal = f32::from_bits(0x0000_ffff);
    vec![
        case(
            "ex2.approx.ftz.f32",
            &[
                ([F(3.0)], F(8.0)),
                ([F(-1.0)], F(0.5)),
                ([F(0.0)], F(1.0)),
                ([F(subnormal)], F(1.0)),
                ([F(0.5)], F(f32::from_bits(0x3fb5_04f3))),
                // 2^-130 is subnormal.
                ([F(-130.0)], F(0.0)),
                ([F(-INF)], F(0.0)),
                ([F(INF)], F(INF)),
                ([F(f32::NAN)], NAN),
            ],
        ),
        case(
            "ex2.approx.f32",
            &[
                ([F(-130.0)], F(f32::from_bits(1 << 19))),
                ([F(4.0)], F(16.0)),
            ],
        ),
        case(
            "lg2.approx.f32",
            &[([F(8.0)], F(3.0)), ([F(0.0)], F(-INF)), ([F(-1.0)], NAN)],
        ),
        case(
            "rcp.approx.ftz.f32",
            &[
                ([F(4.0)], F(0.25)),
                ([F(subnormal)], F(INF)),
                ([F(-INF)], F(-0.0)),
            ],
        ),
        case(
            "rsqrt.approx.f32",
            &[([F(4.0)], F(0.5)), ([F(0.0)], F(INF)), ([F(-1.0)], NAN)],
        ),
    ]
}
