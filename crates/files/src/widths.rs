//! Floating-point elements of tensors as f32, and f32 values as elements.

use half::{bf16, f16};
use safetensors::Dtype;
use std::borrow::Cow;

/// Appends little-endian elements as f32.
///
/// # Panics
/// If they are not f32, bf16, f16 or FP8 with four bits of exponent.
pub fn widen(dtype: Dtype, bytes: &[u8], values: &mut Vec<f32>) {
    let halves = || bytes.as_chunks().0.iter().copied();
    match dtype {
        Dtype::BF16 => values.extend(halves().map(|half| bf16::from_le_bytes(half).to_f32())),
        Dtype::F16 => values.extend(halves().map(|half| f16::from_le_bytes(half).to_f32())),
        Dtype::F32 => values.extend(bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes)),
        Dtype::F8_E4M3 => values.extend(bytes.iter().copied().map(from_e4m3)),
        other => panic!("{other:?} is not widened to f32"),
    }
}

/// FP8 with four bits of exponent, three of mantissa, one NaN of either sign, and no infinity (Micikevicius et al. 2022).
fn from_e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let size = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 8.0 * 2f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if byte >> 7 == 1 { -size } else { size }
}

/// The bytes of values in f32, or rounded to the nearest bf16.
///
/// # Panics
/// For any other type.
pub fn narrow(values: &[f32], dtype: Dtype) -> Cow<'_, [u8]> {
    match dtype {
        Dtype::BF16 => {
            let mut bytes = vec![0; 2 * values.len()];
            let halves = bytes.as_chunks_mut().0.iter_mut();
            for (half, value) in halves.zip(values) {
                *half = bf16::from_f32(*value).to_le_bytes();
            }
            Cow::Owned(bytes)
        }
        Dtype::F32 => Cow::Borrowed(bytemuck::cast_slice(values)),
        other => panic!("values are written in f32 or bf16, not in {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_narrowed_is_widened_again_to_the_nearest() {
        // Halfway between two of bf16: to the even one.
        let halfway = 1.0 + 1.5 / 128.0;
        let values = [1.0, -2.5, 3.0, halfway, 0.0];
        for (dtype, size, expected) in [
            (Dtype::F32, 4, values),
            (Dtype::BF16, 2, [1.0, -2.5, 3.0, 1.015625, 0.0]),
        ] {
            let bytes = narrow(&values, dtype);
            assert_eq!(bytes.len(), size * values.len());
            let mut found = vec![7.0];
            widen(dtype, &bytes, &mut found);
            assert_eq!(found[1..], expected);
        }
        let mut found = Vec::new();
        widen(Dtype::F16, &[0x00, 0x3c, 0x00, 0xc0], &mut found);
        assert_eq!(found, [1.0, -2.0]);
    }

    /// Values of the format's definition: the least, the least that is normal, 1, the largest.
    #[test]
    fn fp8_is_widened() {
        let mut found = Vec::new();
        widen(
            Dtype::F8_E4M3,
            &[0x00, 0x01, 0x08, 0x38, 0xb9, 0x7e],
            &mut found,
        );
        assert_eq!(found, [0.0, 0.001953125, 0.015625, 1.0, -1.125, 448.0]);
        widen(Dtype::F8_E4M3, &[0x7f, 0xff], &mut found);
        assert!(found[6..].iter().all(|value| value.is_nan()));
    }
}
