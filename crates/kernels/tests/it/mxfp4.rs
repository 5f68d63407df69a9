//! MXFP4 on the host: values of the OCP's specification of MX formats, and roundings by hand.

use kernels::quantise::{
    BlockScale, MXFP4_EXPONENT_MAX, dequantise_block, quantise_blocks, round_to_codes,
};
use memory::Codes;

const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

fn values(exponent: u8) -> Vec<f32> {
    // Codes 0 to 15, the first of a byte in its lower half.
    let bytes: Vec<u8> = (0..8)
        .map(|pair| (2 * pair) | ((2 * pair + 1) << 4))
        .collect();
    let mut values = vec![0.0; 16];
    dequantise_block(&bytes, BlockScale::Exponent(exponent), &mut values);
    values
}

#[test]
fn codes_are_magnitudes_times_a_power_of_two() {
    for exponent in 0..=MXFP4_EXPONENT_MAX {
        let power = (f64::from(exponent) - 127.0).exp2();
        let expected = MAGNITUDES.map(|magnitude| (f64::from(magnitude) * power) as f32);
        let found = values(exponent);
        assert_eq!(found[..8], expected, "{exponent}");
        let bits = |value: &f32| value.to_bits();
        let negative: Vec<u32> = expected.iter().map(|value| (-value).to_bits()).collect();
        assert_eq!(found[8..].iter().map(bits).collect::<Vec<_>>(), negative);
        assert!(
            found
                .iter()
                .all(|value| half::bf16::from_f32(*value).to_f32() == *value)
        );
    }
    assert!(half::bf16::from_f32(6.0 * 2f32.powi(126)).is_infinite());
}

#[test]
fn values_are_rounded_to_the_even_code() {
    let mut block = [0.0; 32];
    let given = [
        4.0, 5.0, 7.9, -3.5, 2.5, 1.75, -1.25, 0.75, 0.25, -0.26, 0.74, 3.49,
    ];
    block[..12].copy_from_slice(&given);
    let (codes, powers) = quantise_blocks(Codes::Mxfp4, &block);
    assert_eq!(powers, [1.0]);
    // 4, 4, 6, -4, 2, 2, -1, 1, 0, -0.5, 0.5, 3.
    let expected = [0x66, 0xe7, 0x44, 0x2a, 0x90, 0x51];
    assert_eq!(codes[..6], expected);
    for (largest, power) in [(1.0, 0.25), (7.99, 1.0), (8.0, 2.0), (0.0, 2f32.powi(-127))] {
        let (_, powers) = quantise_blocks(Codes::Mxfp4, &[-largest; 32]);
        assert_eq!(powers, [power], "{largest}");
    }
}

/// What was in MXFP4 is not changed by a second rounding, whatever its powers were.
#[test]
fn values_of_codes_stay_as_they_are() {
    for exponent in [0, 1, 2, 3, 100, 127, 250, MXFP4_EXPONENT_MAX] {
        for most in [1, 2, 3, 6, 7] {
            let of = values(exponent);
            let code = |at: usize| at % (most + 1) + 8 * (at % 3 / 2);
            let before: Vec<f32> = (0..96).map(|at| of[code(at)]).collect();
            let mut after = before.clone();
            round_to_codes(Codes::Mxfp4, &mut after);
            assert_eq!(after, before, "{exponent} {most}");
        }
    }
}
