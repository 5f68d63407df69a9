//! Moves and conversions.

use crate::harness::Value::{D, F, H, L, P, U};
use crate::harness::{Case, case, case_as};
use kernels::fp8::Fp8;

pub fn table() -> Vec<Case> {
    let f32_of = |bits| F(f32::from_bits(bits));
    vec![
        case(
            "cvt.f32.bf16",
            &[([H(0x3fc0)], F(1.5)), ([H(0x8001)], f32_of(0x8001_0000))],
        ),
        case("cvt.f64.f32", &[([F(0.1)], D(f64::from(0.1f32)))]),
        case(
            "cvt.rn.bf16.f32",
            &[
                ([F(1.0)], H(0x3f80)),
                // Ties go to the even neighbour.
                ([f32_of(0x3f80_8000)], H(0x3f80)),
                ([f32_of(0x3f81_8000)], H(0x3f82)),
                ([f32_of(0x3f80_8001)], H(0x3f81)),
                ([F(f32::MAX)], H(0x7f80)),
                ([F(-0.0)], H(0x8000)),
                ([f32_of(0x7f80_0001)], H(0x7fff)),
                ([f32_of(0x0001_0000)], H(0x0001)),
            ],
        ),
        case("cvt.rn.bf16x2.f32", &[([F(1.0), F(-2.0)], U(0x3f80_c000))]),
        case(
            "cvt.rn.satfinite.e4m3x2.f32",
            &[
                // The first operand is the upper byte: 1 is 0 0111 000, and -448, the largest, 1 1111 110.
                ([F(1.0), F(-448.0)], H(0x38fe)),
                // Larger values saturate. NaN has the same code with either sign.
                ([F(f32::INFINITY), F(-1e30)], H(0x7efe)),
                ([F(f32::NAN), F(-f32::NAN)], H(0x7f7f)),
                // Ties go to the even neighbour.
                ([F(1.0625), F(1.1875)], H(0x383a)),
                ([F(1.0626), F(464.0)], H(0x397e)),
                // The smallest is 2^-9, and half of it a tie with zero, which has a sign.
                ([F(0.001953125), F(-0.0009765625)], H(0x0180)),
                ([F(0.0009765626), F(-0.0)], H(0x0180)),
                // The last code below 2^-6, and a value nearer to 2^-6.
                ([F(0.013671875), F(0.0155)], H(0x0708)),
            ],
        ),
        case(
            "cvt.rn.satfinite.e5m2x2.f32",
            &[
                ([F(1.0), F(-57_344.0)], H(0x3cfb)),
                ([F(f32::INFINITY), F(-1e30)], H(0x7bfb)),
                ([F(f32::NAN), F(-f32::NAN)], H(0x7f7f)),
                ([F(1.125), F(1.375)], H(0x3c3e)),
                ([F(1.1251), F(61_440.0)], H(0x3d7b)),
                ([F(0.000015258789), F(-0.0000076293945)], H(0x0180)),
            ],
        ),
        case(
            "cvt.rn.f32.f64",
            &[
                ([D(1.0 + f64::from(f32::EPSILON) / 2.0)], F(1.0)),
                ([D(1e300)], F(f32::INFINITY)),
                ([D(f64::NAN)], f32_of(0x7fff_ffff)),
            ],
        ),
        case(
            "cvt.rn.f32.s32",
            &[
                ([U(-3i32 as u32)], F(-3.0)),
                ([U(16_777_217)], F(16_777_216.0)),
                ([U(16_777_219)], F(16_777_220.0)),
            ],
        ),
        case(
            "cvt.rn.f32.u64",
            &[([L(u64::MAX)], F(18_446_744_073_709_551_616.0))],
        ),
        case("cvt.rn.f64.s32", &[([U(-3i32 as u32)], D(-3.0))]),
        case(
            "cvt.rn.f64.u64",
            &[([L((1 << 53) + 1)], D(9_007_199_254_740_992.0))],
        ),
        case(
            "cvt.s32.s16",
            &[([H(0xfffe)], U(-2i32 as u32)), ([H(7)], U(7))],
        ),
        case("cvt.s64.s32", &[([U(-2i32 as u32)], L(-2i64 as u64))]),
        case(
            "cvt.sat.f32.f32",
            &[
                ([F(0.25)], F(0.25)),
                ([F(1.5)], F(1.0)),
                ([F(-1.5)], F(0.0)),
                ([F(-0.0)], F(0.0)),
                ([F(f32::NAN)], F(0.0)),
            ],
        ),
        case("cvt.u16.u32", &[([U(0x1234_5678)], H(0x5678))]),
        case("cvt.u16.u64", &[([L(0x1234_5678_9abc)], H(0x9abc))]),
        case("cvt.u32.u16", &[([H(0xfffe)], U(0xfffe))]),
        case(
            "cvt.u32.u64",
            &[([L(0x1234_5678_9abc_def0)], U(0x9abc_def0))],
        ),
        case("cvt.u64.u16", &[([H(0xfffe)], L(0xfffe))]),
        case("cvt.u64.u32", &[([U(u32::MAX)], L(0xffff_ffff))]),
        case("mov.b32", &[([U(0x3f80_0000)], F(1.0))]),
        // The first of two halves is the lower one.
        case_as(
            "mov.b32",
            "%d, {%a, %b}",
            &[([H(0x1111), H(0x2222)], U(0x2222_1111))],
        ),
        case_as("mov.b32", "%d, {0, %a}", &[([H(0x3f80)], F(1.0))]),
        case_as(
            "mov.b64",
            "%d, {%a, %b}",
            &[([U(0x1111), U(0x2222)], L(0x2222_0000_1111))],
        ),
        case("mov.b64", &[([D(1.0)], L(0x3ff0_0000_0000_0000))]),
        case("mov.f32", &[([F(1.5)], F(1.5))]),
        case_as("mov.f32", "%d, 0f3FC00000", &[([], F(1.5))]),
        case("mov.f64", &[([D(1.5)], D(1.5))]),
        case_as("mov.f64", "%d, 0d3FF8000000000000", &[([], D(1.5))]),
        case("mov.pred", &[([P(true)], P(true)), ([P(false)], P(false))]),
        case_as("mov.pred", "%d, -1", &[([], P(true))]),
        case_as("mov.pred", "%d, 0", &[([], P(false))]),
        case("mov.u16", &[([H(9)], H(9))]),
        case_as("mov.u16", "%d, -2", &[([], H(0xfffe))]),
        case("mov.u32", &[([U(9)], U(9))]),
        case_as("mov.u32", "%d, %ntid.x", &[([], U(32))]),
        case_as("mov.u32", "%d, -2147483648", &[([], U(1 << 31))]),
        case("mov.u64", &[([L(9)], L(9))]),
        case_as("mov.u64", "%d, -1", &[([], L(u64::MAX))]),
        case_as(
            "mov.b32",
            "{%word_low, %d}, %a",
            &[([U(0x2222_1111)], H(0x2222))],
        )
        .with(".reg .b16 %word_low;"),
        case_as(
            "mov.b64",
            "{%word, %d}, %a",
            &[([L(0x2222_0000_1111)], U(0x2222))],
        ),
    ]
}

/// Two roads to the same codes: the instruction by the manual, and the trainer's own integers.
#[test]
fn conversions_to_fp8_make_the_trainers_codes() {
    for (opcode, format) in [
        ("cvt.rn.satfinite.e4m3x2.f32", Fp8::E4m3),
        ("cvt.rn.satfinite.e5m2x2.f32", Fp8::E5m2),
    ] {
        let all = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16));
        // Every value, every middle between two, and what lies beside these, of either sign.
        let values: Vec<f32> = (0..0x7f).map(|code| format.value(code)).collect();
        let middles = values.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
        let edges = values.iter().copied().chain(middles);
        let edges = edges.flat_map(|edge| [edge.next_down(), edge, edge.next_up()]);
        let edges = edges.flat_map(|edge| [edge, -edge]);
        let inputs: Vec<f32> = all.chain(edges).collect();
        for inputs in inputs.chunks(2 * 32) {
            let pairs = inputs
                .chunks(2)
                .map(|pair| [pair[0], *pair.last().unwrap()]);
            let rows = pairs.map(|pair| {
                let codes = pair.map(|value| format.code(value));
                (pair.map(F), H(u16::from_be_bytes(codes)))
            });
            case(opcode, &rows.collect::<Vec<_>>()).check();
        }
    }
}
