//! NormalFloat of 4 bits, with `absmax` that are quantised themselves (Dettmers et al. 2023, "QLoRA"), as bitsandbytes
//! 0.50.2 has it.

use super::SIGNED;
use memory::Codes;

/// Values of the 16 codes, ascending: quantiles of the normal distribution, scaled to [-1, 1]. Code 7 is zero.
pub const NF4: [f32; 16] = {
    #[rustfmt::skip]
    let bits: [u32; 16] = [
        0xbf800000, 0xbf3239b1, 0xbf066b30, 0xbeca32a0, 0xbe91a24d, 0xbe3d353f, 0xbdba7871, 0x00000000,
        0x3da2faff, 0x3e24cae3, 0x3e7c04dd, 0x3ead033a, 0x3ee1a4b8, 0x3f1007ab, 0x3f3913b3, 0x3f800000,
    ];
    let mut values = [0.0; 16];
    let mut code = 0;
    while code < 16 {
        values[code] = f32::from_bits(bits[code]);
        code += 1;
    }
    values
};

/// The least magnitude that a block's inverse is taken of, so that it is finite.
const ABSMAX_MIN: f32 = 1e-38;

/// The middles between neighbours.
const MIDDLES: [f32; 15] = {
    let mut middles = [0.0; 15];
    let mut code = 0;
    while code < 15 {
        middles[code] = (NF4[code] + NF4[code + 1]) / 2.0;
        code += 1;
    }
    middles
};

/// The code of the value nearest to `x`; of two equally near ones, the lower.
#[inline(always)]
fn nearest(x: f32) -> u8 {
    MIDDLES.iter().map(|middle| u8::from(x > *middle)).sum()
}

/// Quantises at most [`Codes::NF4_BLOCK`] values to two codes a byte, the first in the upper half. Returns their
/// `absmax`, the largest magnitude.
pub fn quantise_nf4(values: &[f32], codes: &mut [u8]) -> f32 {
    let absmax = values
        .iter()
        .fold(0.0f32, |most, value| most.max(value.abs()));
    let inverse = 1.0 / absmax.max(ABSMAX_MIN);
    let code = |value: f32| nearest((value * inverse).clamp(-1.0, 1.0));
    for (byte, pair) in codes.iter_mut().zip(values.chunks(2)) {
        // An odd last element is stored beside a zero.
        let second = pair.get(1).copied().unwrap_or(0.0);
        *byte = code(pair[0]) << 4 | code(second);
    }
    absmax
}

/// The `absmax` of all blocks of a matrix, quantised.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QuantisedAbsmax {
    /// A code for each block.
    pub codes: Vec<u8>,
    /// An `absmax` for each [`Codes::BLOCK`] of these codes.
    pub absmax: Vec<f32>,
    /// The mean, which is added to each.
    pub offset: f32,
}

/// Quantises the `absmax` of the blocks of a matrix. The mean is summed in f64.
pub fn quantise_absmax(absmax: &[f32]) -> QuantisedAbsmax {
    let sum: f64 = absmax.iter().copied().map(f64::from).sum();
    quantise_absmax_above(absmax, (sum / absmax.len().max(1) as f64) as f32)
}

/// As [`quantise_absmax`], above a given offset.
pub fn quantise_absmax_above(absmax: &[f32], offset: f32) -> QuantisedAbsmax {
    let mut codes = Vec::with_capacity(absmax.len());
    let blocks = absmax.chunks(Codes::BLOCK).map(|block| {
        let left = block.iter().map(|value| value - offset);
        let largest = left
            .clone()
            .fold(0.0f32, |most, value| most.max(value.abs()));
        let inverse = 1.0 / largest.max(ABSMAX_MIN);
        codes.extend(left.map(|value| SIGNED.nearest(value * inverse)));
        largest
    });
    let absmax = blocks.collect();
    QuantisedAbsmax {
        codes,
        absmax,
        offset,
    }
}

/// The values that a block's 16 codes stand for, from the code of its `absmax`, and the `absmax` and offset of that.
#[inline(always)]
pub fn nf4_values(absmax_code: u8, absmax: f32, offset: f32) -> [f32; 16] {
    let scale = SIGNED.values[usize::from(absmax_code)] * absmax + offset;
    NF4.map(|value| value * scale)
}
