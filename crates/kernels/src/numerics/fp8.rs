//! FP8 (Micikevicius et al. 2022): eight bits for a value, and one scale for all values of a tensor.
//!
//! A scale is a power of two, so that a value is rounded once and products of scales are exact. It follows from the
//! tensor's own largest magnitude, so nothing is remembered from step to step. The largest magnitude is a maximum of
//! integers: any order gives the same, and NaN is above infinity, which is above all others.

use memory::DType;

/// A format of eight bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8 {
    /// Four bits of exponent, three of fraction: up to 448, without infinity (e4m3fn).
    E4m3,
    /// Five bits of exponent, two of fraction: up to 57,344.
    E5m2,
}

/// The code of NaN in both formats.
pub const NAN_CODE: u8 = 0x7f;

/// Exponents of factors lie between this and its negative, so that the product of two scales is finite and normal.
const EXPONENT_MAX: i32 = 62;

/// The numbers that tell a format from the other.
struct Format {
    /// The largest value, as bits of f32.
    largest: u32,
    /// The smallest value with a whole fraction, as bits of f32.
    smallest_normal: u32,
    /// Bits of f32's fraction that are rounded away.
    dropped: u32,
    /// The difference of the exponents' biases of f32 and of a code, at the place of a code's exponent.
    rebias: u32,
    /// A power of two to which f32 adds only multiples of the smallest value.
    aligner: f32,
    /// The exponent of the largest value.
    exponent: i32,
}

impl Fp8 {
    /// The format of tensors of a type.
    pub fn of(dtype: DType) -> Option<Fp8> {
        match dtype {
            DType::F8E4M3 => Some(Fp8::E4m3),
            DType::F8E5M2 => Some(Fp8::E5m2),
            _ => None,
        }
    }

    /// The type of tensors in this format.
    pub fn dtype(self) -> DType {
        match self {
            Fp8::E4m3 => DType::F8E4M3,
            Fp8::E5m2 => DType::F8E5M2,
        }
    }

    #[inline(always)]
    const fn format(self) -> Format {
        match self {
            Fp8::E4m3 => Format {
                largest: 0x43e0_0000,
                smallest_normal: 0x3c80_0000,
                dropped: 20,
                rebias: 120 << 3,
                aligner: 16384.0,
                exponent: 8,
            },
            Fp8::E5m2 => Format {
                largest: 0x4760_0000,
                smallest_normal: 0x3880_0000,
                dropped: 21,
                rebias: 112 << 2,
                aligner: 128.0,
                exponent: 15,
            },
        }
    }

    /// The code of the nearest value, ties to the even code; what is larger than all values becomes the largest, and NaN
    /// becomes [`NAN_CODE`].
    #[inline(always)]
    pub fn code(self, value: f32) -> u8 {
        let format = self.format();
        let (bits, sign) = (value.to_bits() & 0x7fff_ffff, value.to_bits() >> 24 & 0x80);
        let size = bits.min(format.largest);
        let is_odd = size >> format.dropped & 1;
        let rounded = (size + (1 << (format.dropped - 1)) - 1 + is_odd) >> format.dropped;
        let aligned = (f32::from_bits(size) + format.aligner).to_bits() - format.aligner.to_bits();
        let code = match size >= format.smallest_normal {
            true => rounded - format.rebias,
            false => aligned,
        };
        match bits > 0x7f80_0000 {
            true => NAN_CODE,
            false => (code | sign) as u8,
        }
    }

    /// The value of a code.
    pub fn value(self, code: u8) -> f32 {
        let format = self.format();
        let fraction_bits = 23 - format.dropped;
        let (size, sign) = (u32::from(code & 0x7f), u32::from(code >> 7));
        let (exponent, fraction) = (size >> fraction_bits, size & ((1 << fraction_bits) - 1));
        let value = match (self, exponent, fraction) {
            (Fp8::E4m3, 15, 7) | (Fp8::E5m2, 31, 1..) => f32::NAN,
            (Fp8::E5m2, 31, 0) => f32::INFINITY,
            (_, 0, fraction) => {
                let aligned = format.aligner.to_bits() + fraction;
                f32::from_bits(aligned) - format.aligner
            }
            _ => f32::from_bits((size + format.rebias) << format.dropped),
        };
        f32::from_bits(value.to_bits() | sign << 31)
    }

    /// Two powers of two for a tensor with this largest magnitude: values times the factor are rounded to codes, and codes times the
    /// scale are values again. Both are 1 for zero, and NaN for what is not finite.
    #[inline(always)]
    pub fn factor_and_scale(self, largest: f32) -> [f32; 2] {
        let bits = largest.to_bits() & 0x7fff_ffff;
        let exponent = (bits >> 23) as i32 - 127;
        let above = i32::from(bits & 0x007f_ffff > 0x0060_0000);
        let room = self.format().exponent - exponent - above;
        let room = room.clamp(-EXPONENT_MAX, EXPONENT_MAX);
        let power = |exponent: i32| f32::from_bits(((127 + exponent) as u32) << 23);
        match bits {
            0 => [1.0; 2],
            0x7f80_0000.. => [f32::NAN; 2],
            _ => [power(room), power(-room)],
        }
    }
}
