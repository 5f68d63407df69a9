//! Moves and conversions.

use crate::harness::Value::{D, F, H, L, P, U};
use crate::harness::{Case, case, case_as};

pub fn table() -> Vec<Case> {
    let f32_of = |bits| F(f32::from_bits(bits));
    vec![
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
