//! Floating-point elements of tensors as f32, and f32 values as elements.

use half::{bf16, f16};
use safetensors::Dtype;
use std::borrow::Cow;

/// Appends little-endian elements as f32.
///
/// # Panics
/// If they are not f32, bf16 or f16.
pub fn widen(dtype: Dtype, bytes: &[u8], values: &mut Vec<f32>) {
    let halves = || bytes.as_chunks().0.iter().copied();
    match dtype {
        Dtype::BF16 => values.extend(halves().map(|half| bf16::from_le_bytes(half).to_f32())),
        Dtype::F16 => values.extend(halves().map(|half| f16::from_le_bytes(half).to_f32())),
        Dtype::F32 => values.extend(bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes)),
        other => panic!("{other:?} is not widened to f32"),
    }
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
}
