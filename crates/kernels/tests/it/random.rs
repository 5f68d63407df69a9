//! Random numbers by counter are uniform, independent of their neighbours, and round without bias.

use half::bf16;
use kernels::random::{key, random_u32};
use kernels::split::round_stochastically;
use proptest::prelude::*;
use std::collections::HashSet;

const DRAWS: u64 = 1 << 20;

/// Keys as a run has them in its first steps, and poor ones.
fn keys() -> Vec<u64> {
    let of_steps = (1..4).map(|step| key(0, step, 1));
    of_steps.chain([0, 1, u64::MAX]).collect()
}

/// Each bit is set in half of the words: within five standard deviations.
#[track_caller]
fn assert_balanced(words: impl Iterator<Item = u32>, what: &str) {
    let (mut counts, mut draws) = ([0u64; 32], 0u64);
    for word in words {
        draws += 1;
        for (bit, count) in counts.iter_mut().enumerate() {
            *count += u64::from(word >> bit & 1);
        }
    }
    let (half, deviation) = (draws as f64 / 2.0, (draws as f64).sqrt() / 2.0);
    for (bit, count) in counts.into_iter().enumerate() {
        let off = (count as f64 - half).abs() / deviation;
        assert!(off < 5.0, "{what}: bit {bit} is {off} deviations off");
    }
}

#[test]
fn bits_are_balanced() {
    for key in keys() {
        for start in [0, (1 << 32) - DRAWS / 2] {
            let words = (start..start + DRAWS).map(|index| random_u32(key, index));
            assert_balanced(words, &format!("key {key:x} from {start:x}"));
        }
    }
}

/// What a bit does says nothing of the same bit, or the next, in another word.
#[test]
fn words_do_not_follow_their_neighbours() {
    for key in keys() {
        for (name, distance) in [("next", 1), ("block", 256), ("far", 1 << 32)] {
            for turn in [0, 1, 16] {
                let words = (0..DRAWS).map(|index| {
                    let other = random_u32(key, index + distance).rotate_right(turn);
                    random_u32(key, index) ^ other
                });
                assert_balanced(words, &format!("key {key:x}, {name}, {turn}"));
            }
        }
    }
}

/// Keys of one bit's difference, of neighbouring steps, and of all bits' difference (moments and weights).
#[test]
fn another_key_gives_other_numbers() {
    let first = key(7, 1, 1);
    let others = [
        first ^ 1,
        first ^ 1 << 32,
        first ^ 1 << 63,
        !first,
        key(7, 2, 1),
        key(8, 1, 1),
        key(7, 1, 2),
    ];
    for other in others {
        let words = (0..DRAWS).map(|index| random_u32(first, index) ^ random_u32(other, index));
        assert_balanced(words, &format!("{other:x}"));
    }
}

/// The statistic of 65,535 degrees of freedom, for each half of the words: within six standard deviations of its mean.
#[test]
fn halves_are_uniform() {
    for key in keys() {
        for shift in [0, 16] {
            let mut buckets = vec![0u32; 1 << 16];
            let draws = 64 << 16;
            for index in 0..draws {
                buckets[usize::from((random_u32(key, index) >> shift) as u16)] += 1;
            }
            let expected = draws as f64 / 65_536.0;
            let square = |count: &u32| (f64::from(*count) - expected).powi(2) / expected;
            let chi_square: f64 = buckets.iter().map(square).sum();
            let off = (chi_square - 65_535.0) / (2.0f64 * 65_535.0).sqrt();
            assert!(off.abs() < 6.0, "key {key:x}, {shift}: {off}");
        }
    }
}

#[test]
fn no_two_steps_share_a_key() {
    let mut keys = HashSet::new();
    let mut high_halves = HashSet::new();
    for seed in 0..20 {
        for step in 0..500 {
            for stream in 0..3 {
                let key = key(seed, step, stream);
                assert!(keys.insert(key), "{seed} {step} {stream}");
                // Keys that share a half give the same numbers in another order.
                high_halves.insert((key >> 32) as u32);
            }
        }
    }
    assert!(high_halves.len() + 3 >= keys.len(), "{}", high_halves.len());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// With the numbers of a run, the mean of what a value is rounded to is the value: within six deviations.
    #[test]
    fn stochastic_rounding_is_unbiased(
        mantissa in 1f64..2.0,
        exponent in -30i32..30,
        negative in any::<bool>(),
        seed in any::<u64>(),
        step in 1..1000u64,
        shift in prop_oneof![Just(0), Just(16)],
    ) {
        const DRAWS: u64 = 4096;
        let value = (mantissa * f64::from(exponent).exp2() * if negative { -1.0 } else { 1.0 }) as f32;
        let (key, ulp) = (key(seed, step, 1), f64::from(exponent).exp2() / 128.0);
        let mut sum = 0.0;
        for index in 0..DRAWS {
            let rounded = round_stochastically(value, (random_u32(key, index) >> shift) as u16).to_f64();
            prop_assert!((rounded - f64::from(value)).abs() < ulp);
            sum += rounded - f64::from(value);
        }
        let bias = sum / DRAWS as f64 / ulp;
        // The deviation of one rounding is at most half an ulp.
        prop_assert!(bias.abs() < 6.0 * 0.5 / 64.0, "{value}: {bias} ulp");
    }
}

/// Rounding to nearest is told apart by that measure.
#[test]
fn rounding_to_nearest_is_biased() {
    let value = 1.003f32;
    let bias = (f64::from(bf16::from_f32(value).to_f32()) - f64::from(value)) * 128.0;
    assert!(bias.abs() > 6.0 * 0.5 / 64.0, "{bias}");
}
