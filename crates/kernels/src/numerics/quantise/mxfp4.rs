//! Numbers of 4 bits by blocks that share a power of two, as "OCP Microscaling Formats (MX) Specification 1.0" has them.

/// Magnitudes of the codes 0 to 7. Codes 8 to 15 are their negatives.
const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The middles between neighbours.
const MIDDLES: [f32; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];

/// The exponent of the largest magnitude, 1.5 x 2^2.
const LARGEST: i32 = 2;

/// The exponent of f32's bits, and of a block's power of two, that stands for 0.
const BIAS: i32 = 127;

/// The most that the exponent of a block can be, so that bf16 and f32 hold all its values: 6 x 2^(252 - 127).
pub const MXFP4_EXPONENT_MAX: u8 = 252;

/// The power of two that a block's exponent stands for.
#[inline(always)]
fn power(exponent: u8) -> f32 {
    match exponent {
        // Below f32's normal numbers.
        0 => f32::from_bits(1 << 22),
        _ => f32::from_bits(u32::from(exponent) << 23),
    }
}

/// The exponent of a power of two.
pub fn mxfp4_exponent(power: f32) -> u8 {
    (power.to_bits() >> 23) as u8
}

/// The values that a block's 16 codes stand for.
#[inline(always)]
pub fn mxfp4_values(exponent: u8) -> [f32; 16] {
    let power = power(exponent);
    std::array::from_fn(|code| {
        let magnitude = MAGNITUDES[code % 8] * power;
        if code < 8 { magnitude } else { -magnitude }
    })
}

/// Quantises the values of a block to two codes a byte, the first in the lower half. Returns the power of two that they
/// share: that of the largest magnitude, less that of the largest code. Values are rounded to the nearest code, and to the even one of two;
/// those beyond the largest become it.
pub fn quantise_mxfp4(values: &[f32], codes: &mut [u8]) -> f32 {
    let largest = values
        .iter()
        .fold(0.0f32, |most, value| most.max(value.abs()));
    let exponent = i32::from(mxfp4_exponent(largest)) - LARGEST;
    let exponent = exponent.clamp(0, i32::from(MXFP4_EXPONENT_MAX));
    let inverse = power((2 * BIAS - exponent).min(2 * BIAS) as u8);
    let code = |value: f32| {
        let scaled = value.abs() * inverse;
        let is_above = |(code, middle): (usize, &f32)| {
            scaled > *middle || (scaled == *middle && code % 2 == 1)
        };
        let above = MIDDLES
            .iter()
            .enumerate()
            .filter(|middle| is_above(*middle));
        above.count() as u8 | u8::from(value.is_sign_negative()) << 3
    };
    for (byte, pair) in codes.iter_mut().zip(values.chunks(2)) {
        let second = pair.get(1).copied().unwrap_or(0.0);
        *byte = code(pair[0]) | code(second) << 4;
    }
    power(exponent as u8)
}
