//! Matrices that are stored as codes become matrices of plain numbers.

use super::contract::Contract;
use super::declaration::operation;
use memory::{Codes, In, Out};

operation! {
    /// `out`, f32 or bf16 of any shape with `n` elements: the values of 8-bit codes `codes [n]` (u8) of the signed map, each
    /// times the `absmax` (f32, one for each 256 codes) of its block.
    DequantiseBytes "dequantise_bytes": out {
        out: Out<'a> [..out],
        codes: In<'a> [out.elements()] u8,
        absmax: In<'a> [out.elements().div_ceil(Codes::BLOCK)] f32,
    }

    /// `out`, f32 or bf16 of any shape with `n` elements: the values of 4-bit codes, each times the scale of its block of 64.
    /// `codes` (u8) has two codes in a byte, the first in the upper half. A block's scale is the value of its code in
    /// `absmax_codes` (u8, one for each block) times its `absmax` (f32, one for each 256 blocks), plus `offset [1]` (f32).
    /// Every product and sum is f32 on its own, so all implementations give the same bits.
    DequantiseNf4 "dequantise_nf4": out {
        out: Out<'a> [..out],
        codes: In<'a> [out.elements().div_ceil(2)] u8,
        absmax_codes: In<'a> [out.elements().div_ceil(Codes::NF4_BLOCK)] u8,
        absmax: In<'a> [absmax_codes.elements().div_ceil(Codes::BLOCK)] f32,
        offset: In<'a> [1] f32,
    }

    /// `out`, f32 or bf16 of any shape with `n` elements: the values of 4-bit codes, each times the power of two of its block
    /// of 32, which is exact. `codes` (u8) has two codes in a byte, the first in the lower half. A code is its sign, two bits of exponent
    /// and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6, then their negatives. The power of a block is 2^(e - 127) with its `e` in
    /// `exponents` (u8, one for each block), of at most [`MXFP4_EXPONENT_MAX`](crate::quantise::MXFP4_EXPONENT_MAX).
    DequantiseMxfp4 "dequantise_mxfp4": out {
        out: Out<'a> [..out],
        codes: In<'a> [out.elements().div_ceil(2)] u8,
        exponents: In<'a> [out.elements().div_ceil(Codes::MXFP4_BLOCK)] u8,
    }
}

impl Contract for DequantiseBytes<'_> {}

impl Contract for DequantiseNf4<'_> {}

impl Contract for DequantiseMxfp4<'_> {}
