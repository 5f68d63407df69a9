//! FP8: conversions by checksums that NVIDIA's header gave, against another implementation, and against a search; scales.

use float8::{F8E4M3, F8E5M2};
use half::bf16;
use kernels::fp8::{Fp8, NAN_CODE};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sha2::{Digest, Sha256};

const FORMATS: [Fp8; 2] = [Fp8::E4m3, Fp8::E5m2];

/// The first half of the checksum of the codes of all bf16 times a factor, in the order of their bits.
fn checksum(format: Fp8, factor: f32) -> String {
    let values = (0..=u16::MAX).map(|bits| bf16::from_bits(bits).to_f32());
    let codes: Vec<u8> = values.map(|value| format.code(value * factor)).collect();
    let digest = Sha256::digest(codes);
    digest[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[test]
fn all_bf16_have_the_codes_that_nvidias_header_gives() {
    let small = 2f32.powi(-12);
    assert_eq!(checksum(Fp8::E4m3, 1.0), "2f8096b3b00699a8");
    assert_eq!(checksum(Fp8::E4m3, small), "04415c60d6ccc91b");
    assert_eq!(checksum(Fp8::E5m2, 1.0), "69d1394f72425f9b");
    assert_eq!(checksum(Fp8::E5m2, small), "557c5233c5c692c4");
}

/// Of 10^8 f32 of all magnitudes. The other implementation keeps the sign of NaN.
#[test]
fn codes_are_those_of_another_implementation() {
    let spread = (0..100_000_000u64).map(|at| (at * 2_654_435_761 % (1 << 32)) as u32);
    let mut finite = 0;
    for bits in spread {
        let value = f32::from_bits(bits);
        let codes = FORMATS.map(|format| format.code(value));
        match value.is_nan() {
            true => assert_eq!(codes, [NAN_CODE; 2]),
            false => {
                let others = [
                    F8E4M3::from_f32(value).to_bits(),
                    F8E5M2::from_f32(value).to_bits(),
                ];
                assert_eq!(codes, others, "{value:e}");
                finite += 1;
            }
        }
    }
    assert!(finite > 99_000_000, "{finite}");
}

/// Codes of finite values, in order of their values.
fn finite(format: Fp8) -> Vec<u8> {
    let last = match format {
        Fp8::E4m3 => 0x7e,
        Fp8::E5m2 => 0x7b,
    };
    (0..=last).collect()
}

/// Values around every code and every middle between two.
#[test]
fn a_code_is_the_nearest_and_of_two_the_even_one() {
    for format in FORMATS {
        let codes = finite(format);
        for pair in codes.windows(2) {
            let [low, high] = [pair[0], pair[1]].map(|code| format.value(code));
            let middle = (low + high) / 2.0;
            let even = pair[usize::from(pair[0] % 2 == 1)];
            let expected = [
                (low, pair[0]),
                (middle.next_down(), pair[0]),
                (middle, even),
                (middle.next_up(), pair[1]),
                (high, pair[1]),
            ];
            for (value, code) in expected {
                assert_eq!(format.code(value), code, "{format:?}: {value:e}");
                assert_eq!(format.code(-value), code | 0x80, "{format:?}: -{value:e}");
            }
        }
        let largest = *codes.last().unwrap();
        for value in [format.value(largest) * 1.5, f32::MAX, f32::INFINITY] {
            assert_eq!(format.code(value), largest);
        }
    }
    assert_eq!(Fp8::E4m3.value(0x7e), 448.0);
    assert_eq!(Fp8::E5m2.value(0x7b), 57_344.0);
    assert_eq!(Fp8::E4m3.value(1), 2f32.powi(-9));
    assert_eq!(Fp8::E5m2.value(1), 2f32.powi(-16));
}

#[test]
fn values_are_those_of_another_implementation() {
    for code in 0..=u8::MAX {
        let others = [
            F8E4M3::from_bits(code).to_f32(),
            F8E5M2::from_bits(code).to_f32(),
        ];
        for (format, other) in FORMATS.into_iter().zip(others) {
            let value = format.value(code);
            let same = value.to_bits() == other.to_bits() || value.is_nan() && other.is_nan();
            assert!(
                same,
                "{format:?}: {code:#x} is {value:e}, elsewhere {other:e}"
            );
        }
    }
}

/// The largest magnitude fits, and twice the factor would not.
#[test]
fn a_scale_is_the_smallest_power_of_two_with_which_nothing_saturates() {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    for format in FORMATS {
        let most = format.value(*finite(format).last().unwrap());
        for _ in 0..100_000 {
            let exponent = random.random_range(-45..45);
            let largest = random.random_range(1.0..2.0f32) * 2f32.powi(exponent);
            let [factor, scale] = format.factor_and_scale(largest);
            assert_eq!(factor * scale, 1.0);
            assert_eq!(factor.to_bits() & 0x7f_ffff, 0, "a power of two");
            assert!(largest * factor <= most && 2.0 * largest * factor > most);
        }
        assert_eq!(format.factor_and_scale(most), [1.0, 1.0]);
        assert_eq!(format.factor_and_scale(most.next_up()), [0.5, 2.0]);
        assert_eq!(format.factor_and_scale(0.0), [1.0, 1.0]);
        let ends = [2f32.powi(62), 2f32.powi(-62)];
        assert_eq!(format.factor_and_scale(f32::MIN_POSITIVE), ends);
        assert_eq!(format.factor_and_scale(f32::MAX), [ends[1], ends[0]]);
        for broken in [f32::NAN, -f32::NAN, f32::INFINITY] {
            let both = format.factor_and_scale(broken);
            assert!(both.iter().all(|factor| factor.is_nan()), "{broken}");
        }
    }
}
