//! Properties of the 8-bit quantiser.

use kernels::quantise::{BLOCK, Map, SIGNED, UNSIGNED};
use proptest::prelude::*;

/// The code of the nearest entry by search in f64; of two equally near ones, the even code.
fn nearest(map: &Map, x: f32) -> u8 {
    // Where f64 still tells distances apart; beyond 1 nothing changes.
    let x = f64::from(x.clamp(-2.0, 2.0));
    let distance = |code: &u8| (f64::from(map.values[usize::from(*code)]) - x).abs();
    let order = |a: &u8, b: &u8| {
        let by_distance = distance(a).total_cmp(&distance(b));
        by_distance.then((a % 2).cmp(&(b % 2)))
    };
    (0..=255).min_by(order).unwrap()
}

const MAPS: [&Map; 2] = [&SIGNED, &UNSIGNED];

#[test]
fn every_entry_has_its_own_code() {
    for map in MAPS {
        assert!(map.values.is_sorted_by(|a, b| a < b));
        for (code, value) in (0..=255).zip(map.values) {
            assert_eq!(map.nearest(value), code);
        }
        assert_eq!(map.nearest(f32::INFINITY), 255);
        assert_eq!(map.nearest(f32::NEG_INFINITY), 0);
        assert_eq!(map.nearest(-0.0), map.zero);
    }
}

/// Quantises values on both sides of every border between codes, and on it.
#[test]
fn borders_are_exact_and_ties_even() {
    for map in MAPS {
        let mut ties = 0;
        for code in 0..255u8 {
            let [low, high] = [0, 1].map(|next| f64::from(map.values[usize::from(code) + next]));
            let middle = ((low + high) / 2.0) as f32;
            let at = [middle.next_down(), middle, middle.next_up()];
            for x in at {
                assert_eq!(map.nearest(x), nearest(map, x), "{x:e}");
            }
            assert_eq!([map.nearest(at[0]), map.nearest(at[2])], [code, code + 1]);
            if f64::from(middle) == (low + high) / 2.0 {
                ties += 1;
                assert_eq!(map.nearest(middle) % 2, 0, "{middle:e}");
            }
        }
        assert!(ties > 50, "{ties} midpoints are f32");
    }
}

/// A value of any size, most of them within the map.
fn any_value() -> impl Strategy<Value = f32> {
    prop_oneof![
        -1.1f32..1.1,
        (-12f32..0.0, any::<bool>()).prop_map(|(exponent, negative)| {
            let value = 10f32.powf(exponent);
            if negative { -value } else { value }
        }),
        any::<f32>().prop_filter("a number", |x| x.is_finite()),
    ]
}

/// Blocks whose largest value lies anywhere in the range of f32, far from where products overflow.
fn blocks() -> impl Strategy<Value = Vec<f32>> {
    let values = proptest::collection::vec(-1f32..1.0, 1..=BLOCK);
    let small = proptest::collection::vec(-8f32..0.0, 1..=BLOCK)
        .prop_map(|exponents| exponents.into_iter().map(|x| 10f32.powf(x)).collect());
    (prop_oneof![values, small], -37f32..37.0).prop_map(|(values, exponent): (Vec<f32>, _)| {
        let scale = 10f32.powf(exponent);
        values.into_iter().map(|value| value * scale).collect()
    })
}

fn quantised(map: &Map, values: &[f32]) -> (Vec<u8>, f32) {
    let mut codes = vec![0; values.len()];
    let absmax = map.quantise(values, &mut codes);
    (codes, absmax)
}

fn dequantised(map: &Map, codes: &[u8], absmax: f32) -> Vec<f32> {
    let mut values = vec![0.0; codes.len()];
    map.dequantise(codes, absmax, &mut values);
    values
}

/// Half of the wider gap beside an entry; beyond the ends, what is missing up to 1.
fn largest_error(map: &Map, code: u8) -> f64 {
    let code = usize::from(code);
    let value = |code: usize| f64::from(map.values[code]);
    let below = match code {
        0 => 2.0 * (1.0 - value(0).abs()).min(1.0),
        _ => value(code) - value(code - 1),
    };
    let above = match code {
        255 => 0.0,
        _ => value(code + 1) - value(code),
    };
    below.max(above) / 2.0
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_nearest_entry_is_found(x in any_value()) {
        for map in MAPS {
            prop_assert_eq!(map.nearest(x), nearest(map, x));
        }
    }

    #[test]
    fn codes_rise_with_values(x in any_value(), y in any_value()) {
        for map in MAPS {
            let (low, high) = (x.min(y), x.max(y));
            prop_assert!(map.nearest(low) <= map.nearest(high));
        }
    }

    /// What comes back is within half a gap, but for negatives that would have become zero: those keep their sign.
    #[test]
    fn a_round_trip_is_within_half_a_gap(values in blocks()) {
        let magnitudes: Vec<f32> = values.iter().map(|value| value.abs()).collect();
        for (map, values) in [(&SIGNED, &values), (&UNSIGNED, &magnitudes)] {
            let (codes, absmax) = quantised(map, values);
            let largest = values.iter().fold(0f32, |most, value| most.max(value.abs()));
            prop_assert_eq!(absmax, if largest == 0.0 { 0.0 } else { largest.max(f32::MIN_POSITIVE) });
            let back = dequantised(map, &codes, absmax);
            for ((value, back), code) in values.iter().zip(&back).zip(&codes) {
                let absmax = f64::from(absmax);
                let kept_sign = *value < 0.0 && *code == map.zero.wrapping_sub(1);
                let gaps = if kept_sign { 2.0 } else { 1.0 };
                let allowed = gaps * largest_error(map, *code) * absmax + 1e-6 * f64::from(value.abs()) + 2e-45;
                let error = (f64::from(*value) - f64::from(*back)).abs();
                prop_assert!(error <= allowed, "{value:e} came back as {back:e}, {allowed:e} allowed");
            }
        }
    }

    #[test]
    fn signs_survive(values in blocks()) {
        let (codes, absmax) = quantised(&SIGNED, &values);
        let back = dequantised(&SIGNED, &codes, 1.0);
        for ((value, back), code) in values.iter().zip(back).zip(codes) {
            prop_assert!(*value >= 0.0 || (code < SIGNED.zero && back < 0.0), "{value:e} of {absmax:e}: {code}");
            prop_assert!(*value < 0.0 || (code >= SIGNED.zero && back >= 0.0), "{value:e} of {absmax:e}: {code}");
        }
    }

    /// Quantised again, values that came from codes have the same codes and the same scale, if one has code 255: there
    /// is no -1.
    #[test]
    fn quantising_again_changes_nothing(codes in proptest::collection::vec(any::<u8>(), 1..BLOCK), exponent in -30f32..30.0) {
        let absmax = 10f32.powf(exponent);
        let codes = [codes, vec![255]].concat();
        for map in MAPS {
            let values = dequantised(map, &codes, absmax);
            let again = quantised(map, &values);
            prop_assert_eq!(again, (codes.clone(), absmax));
        }
    }

    /// Where the inverse of the largest value would be infinite.
    #[test]
    fn blocks_of_subnormal_numbers_are_finite(bits in proptest::collection::vec(0u32..0x0080_0000, 1..=BLOCK), sign in any::<bool>()) {
        let sign_bit = if sign { 0x8000_0000 } else { 0 };
        let values: Vec<f32> = bits.iter().map(|bits| f32::from_bits(bits | sign_bit)).collect();
        let (codes, absmax) = quantised(&SIGNED, &values);
        prop_assert!(absmax == f32::MIN_POSITIVE || values.iter().all(|value| *value == 0.0));
        for (value, back) in values.iter().zip(dequantised(&SIGNED, &codes, absmax)) {
            let error = (f64::from(*value) - f64::from(back)).abs();
            prop_assert!(error <= 0.00705 * f64::from(f32::MIN_POSITIVE), "{value:e} came back as {back:e}");
        }
    }
}

#[test]
fn a_block_of_zeros_is_all_zero() {
    for map in MAPS {
        for zero in [0.0, -0.0] {
            let (codes, absmax) = quantised(map, &[zero; 100]);
            assert_eq!(absmax, 0.0);
            assert!(codes.iter().all(|code| *code == map.zero));
            let back = dequantised(map, &codes, absmax);
            assert!(back.iter().all(|value| *value == 0.0));
        }
    }
}
