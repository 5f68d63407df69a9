//! Bits.

use crate::harness::Value::{D, F, H, L, P, U};
use crate::harness::{Case, case};

const HIGH: u64 = 1 << 63;

pub fn table() -> Vec<Case> {
    vec![
        case("and.b16", &[([H(0x8ff1), H(0x80f3)], H(0x80f1))]),
        case("and.b32", &[([U(0b1100), U(0b1010)], U(0b1000))]),
        case("and.b64", &[([L(HIGH | 6), L(HIGH | 3)], L(HIGH | 2))]),
        case("or.b16", &[([H(0x8001), H(0x0f00)], H(0x8f01))]),
        case("or.b32", &[([U(0b1100), U(0b1010)], U(0b1110))]),
        case("or.b64", &[([L(HIGH), L(3)], L(HIGH | 3))]),
        case("xor.b32", &[([U(0b1100), U(0b1010)], U(0b0110))]),
        case("xor.b64", &[([L(HIGH | 6), L(HIGH | 3)], L(5))]),
        case("not.b32", &[([U(0xf0)], U(0xffff_ff0f))]),
        case("not.b64", &[([L(0xf0)], L(!0xf0))]),
        case(
            "popc.b32",
            &[([U(0xf0)], U(4)), ([U(0)], U(0)), ([U(u32::MAX)], U(32))],
        ),
        case("and.pred", &pairs(|a, b| a && b)),
        case("or.pred", &pairs(|a, b| a || b)),
        case("xor.pred", &pairs(|a, b| a != b)),
        case("not.pred", &[([P(true)], P(false)), ([P(false)], P(true))]),
        case(
            "shl.b16",
            &[([H(0x8005), U(4)], H(0x0050)), ([H(5), U(16)], H(0))],
        ),
        case(
            "shr.u16",
            &[([H(0x8000), U(4)], H(0x0800)), ([H(0x8000), U(16)], H(0))],
        ),
        case(
            "shl.b32",
            &[
                ([U(5), U(4)], U(80)),
                ([U(5), U(31)], U(1 << 31)),
                ([U(5), U(32)], U(0)),
                ([U(5), U(33)], U(0)),
            ],
        ),
        case(
            "shl.b64",
            &[([L(5), U(40)], L(5 << 40)), ([L(5), U(64)], L(0))],
        ),
        case(
            "shr.u32",
            &[
                ([U(0x8000_0000), U(4)], U(0x0800_0000)),
                ([U(1 << 31), U(32)], U(0)),
            ],
        ),
        case(
            "shr.s32",
            &[
                ([U(0x8000_0000), U(4)], U(0xf800_0000)),
                ([U(1 << 31), U(40)], U(u32::MAX)),
                ([U(8), U(40)], U(0)),
            ],
        ),
        case(
            "shr.u64",
            &[([L(HIGH), U(60)], L(8)), ([L(HIGH), U(64)], L(0))],
        ),
        case(
            "brev.b32",
            &[([U(1)], U(1 << 31)), ([U(0xc000_0000)], U(3))],
        ),
        // By how much the highest one is to be shifted to become the highest bit.
        case(
            "bfind.shiftamt.u32",
            &[
                ([U(1)], U(31)),
                ([U(0x00ff_0000)], U(8)),
                ([U(1 << 31)], U(0)),
                ([U(0)], U(u32::MAX)),
            ],
        ),
        case(
            "bfi.b32",
            &[
                ([U(0xf), U(0), U(8), U(4)], U(0xf00)),
                ([U(0), U(u32::MAX), U(8), U(4)], U(0xffff_f0ff)),
                ([U(u32::MAX), U(0), U(28), U(8)], U(0xf000_0000)),
                ([U(u32::MAX), U(5), U(3), U(0)], U(5)),
                ([U(u32::MAX), U(5), U(32), U(4)], U(5)),
            ],
        ),
        case(
            "bfi.b64",
            &[
                (
                    [L(0xabcd), L(0x1234), U(32), U(32)],
                    L(0x0000_abcd_0000_1234),
                ),
                ([L(u64::MAX), L(0), U(0), U(64)], L(u64::MAX)),
            ],
        ),
        // Byte k of `b` over `a` is number k; a nibble of 8 and more spreads the sign of the byte.
        case(
            "prmt.b32",
            &[
                ([U(0x3322_1100), U(0x7766_5544), U(0x3210)], U(0x3322_1100)),
                ([U(0x3322_1100), U(0x7766_5544), U(0x0123)], U(0x0011_2233)),
                // The selector of the kernels, 4180: the second byte of `b`'s first, then of `a`.
                ([U(0x3322_1100), U(0x7766_5544), U(4180)], U(0x1100_5544)),
                ([U(0x0000_0080), U(0x7f00_0000), U(0x8f88)], U(0xff00_ffff)),
            ],
        ),
        case(
            "selp.b16",
            &[
                ([H(1), H(2), P(true)], H(1)),
                ([H(1), H(2), P(false)], H(2)),
            ],
        ),
        case(
            "selp.u16",
            &[
                ([H(1), H(2), P(true)], H(1)),
                ([H(1), H(2), P(false)], H(2)),
            ],
        ),
        case(
            "selp.b32",
            &[
                ([U(1), U(2), P(true)], U(1)),
                ([U(1), U(2), P(false)], U(2)),
            ],
        ),
        case(
            "selp.u32",
            &[
                ([U(1), U(2), P(true)], U(1)),
                ([U(1), U(2), P(false)], U(2)),
            ],
        ),
        case(
            "selp.b64",
            &[
                ([L(1), L(2), P(true)], L(1)),
                ([L(1), L(HIGH), P(false)], L(HIGH)),
            ],
        ),
        case(
            "selp.u64",
            &[
                ([L(1), L(2), P(true)], L(1)),
                ([L(1), L(HIGH), P(false)], L(HIGH)),
            ],
        ),
        case(
            "selp.f32",
            &[
                ([F(1.0), F(2.0), P(true)], F(1.0)),
                ([F(1.0), F(-0.0), P(false)], F(-0.0)),
            ],
        ),
        case(
            "selp.f64",
            &[
                ([D(1.0), D(2.0), P(true)], D(1.0)),
                ([D(1.0), D(-0.0), P(false)], D(-0.0)),
            ],
        ),
    ]
}

fn pairs(
    f: impl Fn(bool, bool) -> bool,
) -> [([crate::harness::Value; 2], crate::harness::Value); 4] {
    [(false, false), (false, true), (true, false), (true, true)]
        .map(|(a, b)| ([P(a), P(b)], P(f(a, b))))
}
