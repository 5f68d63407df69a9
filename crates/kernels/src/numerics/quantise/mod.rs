//! Block-wise dynamic quantisation to 8 bits (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization").
//!
//! A block of [`BLOCK`] values is stored as one code per value and the block's largest magnitude, `absmax`, in f32. A
//! code names an entry of a map of 256 values in [-1, 1] or [0, 1], which is finest near zero. A value is its code's
//! entry times `absmax`. Quantising takes the code of the nearest entry; of two equally near ones, the even code.

mod coded;
mod map;
mod mxfp4;
mod nf4;

pub use coded::{BlockScale, dequantise_block, quantise_blocks, round_to_codes};
use map::{SIGNED_BITS, UNSIGNED_BITS};
pub use mxfp4::{MXFP4_EXPONENT_MAX, mxfp4_exponent, mxfp4_values, quantise_mxfp4};
pub use nf4::{
    NF4, QuantisedAbsmax, nf4_values, quantise_absmax, quantise_absmax_above, quantise_nf4,
};

/// Values that share one `absmax`.
pub const BLOCK: usize = 256;

/// A map of codes to values, and back.
pub struct Map {
    /// Values of the codes, ascending.
    pub values: [f32; 256],
    /// The largest f32 whose nearest entry is the code's. It is infinity for the last code.
    pub thresholds: [f32; 256],
    /// The code of zero.
    pub zero: u8,
}

/// The map for values of either sign, such as first moments.
pub static SIGNED: Map = Map::new(&SIGNED_BITS, 127);

/// The map for values that are never negative, such as second moments.
pub static UNSIGNED: Map = Map::new(&UNSIGNED_BITS, 0);

impl Map {
    const fn new(bits: &[u32; 256], zero: u8) -> Map {
        let mut values = [0.0; 256];
        let mut thresholds = [f32::INFINITY; 256];
        let mut code = 0;
        while code < 256 {
            values[code] = f32::from_bits(bits[code]);
            code += 1;
        }
        code = 0;
        while code < 255 {
            thresholds[code] = threshold(values[code], values[code + 1], code % 2 == 0);
            code += 1;
        }
        Map {
            values,
            thresholds,
            zero,
        }
    }

    /// The code of the entry nearest to `x`; of two equally near ones, the even code.
    #[inline(always)]
    pub fn nearest(&self, x: f32) -> u8 {
        let mut code = 0;
        let mut bit = 128;
        while bit > 0 {
            code += if x > self.thresholds[code + bit - 1] {
                bit
            } else {
                0
            };
            bit /= 2;
        }
        code as u8
    }

    /// Quantises at most [`BLOCK`] values; returns their `absmax`: the largest magnitude, at least the smallest normal
    /// f32 unless all are zero. A value below zero never gets the code of zero or above, so that its sign survives.
    #[inline(always)]
    pub fn quantise(&self, values: &[f32], codes: &mut [u8]) -> f32 {
        let largest = values.iter().fold(0.0f32, |largest, value| {
            if value.abs() > largest {
                value.abs()
            } else {
                largest
            }
        });
        let absmax = stored_absmax(largest);
        let inverse = if absmax > 0.0 { 1.0 / absmax } else { 0.0 };
        for (code, value) in codes.iter_mut().zip(values) {
            *code = self.code(*value, inverse);
        }
        absmax
    }

    /// The code of a value in a block whose `absmax` has this inverse.
    #[inline(always)]
    pub(crate) fn code(&self, value: f32, inverse: f32) -> u8 {
        let nearest = self.nearest(value * inverse);
        if value < 0.0 {
            nearest.min(self.zero.wrapping_sub(1))
        } else {
            nearest
        }
    }

    /// The values of a block's codes.
    #[inline(always)]
    pub fn dequantise(&self, codes: &[u8], absmax: f32, values: &mut [f32]) {
        for (value, code) in values.iter_mut().zip(codes) {
            *value = self.values[usize::from(*code)] * absmax;
        }
    }
}

/// The `absmax` stored for a block with this largest magnitude. Its inverse is finite.
#[inline(always)]
pub(crate) fn stored_absmax(largest: f32) -> f32 {
    if largest == 0.0 {
        0.0
    } else {
        largest.max(f32::MIN_POSITIVE)
    }
}

/// The largest f32 that is nearer to `low` than to `high`, or as near if `low` has the even code.
const fn threshold(low: f32, high: f32, low_is_even: bool) -> f32 {
    // Exact: both have 24 bits, and lie within 2^21 of each other or next to zero.
    let middle = (low as f64 + high as f64) / 2.0;
    let rounded = middle as f32;
    let beyond = rounded as f64 > middle || (rounded as f64 == middle && !low_is_even);
    if beyond { rounded.next_down() } else { rounded }
}
