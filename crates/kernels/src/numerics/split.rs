//! Splits f32 masters into bf16 weights and remainders.

use half::bf16;

/// The nearest bf16 of an f32, away from zero if two are equally near, and a 16-bit remainder that restores the f32
/// exactly ([`join`]). (Ties to even cannot: 65,537 values would round to one weight.) Every format of master weights
/// rounds like this, so weights do not depend on the format.
#[inline(always)]
pub fn split(master: f32) -> (bf16, i16) {
    let bits = master.to_bits();
    if master.is_nan() {
        return (bf16::from_bits((bits >> 16) as u16 | 0x40), 0);
    }
    (
        bf16::from_bits((bits.wrapping_add(0x8000) >> 16) as u16),
        bits as i16,
    )
}

/// Restores the f32 that was [`split`].
#[inline(always)]
pub fn join(weight: bf16, remainder: i16) -> f32 {
    let high = u32::from(weight.to_bits()) << 16;
    f32::from_bits(high.wrapping_add_signed(i32::from(remainder)))
}

/// The nearest f32 of 24 bits (sign, exponent, 15 of the mantissa), to even if two are equally near. The lower byte of its
/// [`split`] remainder is zero: the weight and the upper byte restore it. NaN stays NaN; what is beyond the largest of
/// these values by half a step becomes infinity.
#[inline(always)]
pub fn round_to_24_bits(master: f32) -> f32 {
    let bits = master.to_bits();
    let rounded = bits.wrapping_add(0x7f + (bits >> 8 & 1)) & !0xff;
    f32::from_bits(if master.is_nan() { bits } else { rounded })
}

/// [`split`] of an f32 that is first rounded to 24 bits. The weight may be another than without rounding: masters just
/// below the middle between two weights are rounded to it.
#[inline(always)]
pub fn split_24_bits(master: f32) -> (bf16, u8) {
    let (weight, remainder) = split(round_to_24_bits(master));
    (weight, remainder.to_le_bytes()[1])
}

/// Restores the f32 of 24 bits that was split by [`split_24_bits`].
#[inline(always)]
pub fn join_24_bits(weight: bf16, remainder: u8) -> f32 {
    join(weight, i16::from_le_bytes([0, remainder]))
}

/// Rounds an f32 to one of the two bf16 around it, so that the mean is the f32: the nearer one is more likely. `random`
/// has 16 uniformly distributed bits. NaN stays NaN, infinity infinity.
#[inline(always)]
pub fn round_stochastically(value: f32, random: u16) -> bf16 {
    let rounded = value.to_bits().wrapping_add(u32::from(random)) >> 16;
    bf16::from_bits(if value.is_nan() {
        0x7fc0
    } else {
        rounded as u16
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitting_loses_nothing() {
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let master = f32::from_bits((u32::from(high) << 16) | low);
                let (weight, remainder) = split(master);
                if master.is_nan() {
                    assert!(weight.is_nan() && join(weight, remainder).is_nan());
                    continue;
                }
                assert_eq!(join(weight, remainder).to_bits(), master.to_bits());
                let nearest = bf16::from_f32(master);
                let is_tie = low == 0x8000;
                assert!(weight == nearest || is_tie, "{master:e}");
            }
        }
    }

    /// Every weight with every byte is a value of its own, or no number; all values between two are rounded to the nearer.
    #[test]
    fn masters_of_24_bits_are_the_nearest_and_lose_nothing_more() {
        for high in 0..=u16::MAX {
            for byte in 0..=u8::MAX {
                let bits = u32::from(high) << 16 | u32::from(byte) << 8;
                let master = f32::from_bits(bits);
                let (weight, rest) = split_24_bits(master);
                if master.is_nan() {
                    assert!(weight.is_nan() && join_24_bits(weight, rest).is_nan());
                    continue;
                }
                assert_eq!(join_24_bits(weight, rest).to_bits(), bits);
                let is_tie = byte == 0x80;
                assert!(weight == bf16::from_f32(master) || is_tie, "{master:e}");
                // Beyond the largest of these values stands the one that its exponent would continue with.
                let next =
                    f64::from(f32::from_bits(bits + 0x100)).clamp(-2f64.powi(128), 2f64.powi(128));
                for low in [0u32, 1, 0x7f, 0x80, 0x81, 0xff] {
                    let exact = f32::from_bits(bits | low);
                    let (weight, rest) = split_24_bits(exact);
                    if exact.is_nan() {
                        assert!(weight.is_nan(), "{low:x} above infinity");
                        continue;
                    }
                    let off = |value: f64| (value - f64::from(exact)).abs();
                    let rounds_up = match off(next).partial_cmp(&off(f64::from(master))) {
                        Some(std::cmp::Ordering::Equal) => byte & 1 == 1,
                        order => order == Some(std::cmp::Ordering::Less),
                    };
                    let expected = bits + if rounds_up { 0x100 } else { 0 };
                    assert_eq!(join_24_bits(weight, rest).to_bits(), expected, "{exact:e}");
                }
            }
        }
    }

    #[test]
    fn the_ends_of_24_bits() {
        let split = |bits: u32| {
            let (weight, rest) = split_24_bits(f32::from_bits(bits));
            (weight.to_bits(), rest)
        };
        // The largest value that is kept, whose weight is infinity as that of the same f32 is, and the first that is not.
        assert_eq!(split(0x7f7f_ff00), (0x7f80, 0xff));
        assert_eq!(split(0x7f7f_ff7f), (0x7f80, 0xff));
        assert_eq!(split(0x7f7f_ff80), (0x7f80, 0));
        assert_eq!(split(0x7f80_0000), (0x7f80, 0));
        assert_eq!(split(0xff80_0000), (0xff80, 0));
        // The smallest; half of it is a tie, and zero is even.
        assert_eq!((split(0x0000_0100), split(0x0000_0080)), ((0, 1), (0, 0)));
        assert_eq!(split(0x8000_0080), (0x8000, 0));
        // The middle between two weights goes away from zero, and what is rounded to it with it.
        assert_eq!(
            (split(0x3f80_7f7f), split(0x3f80_7f80)),
            ((0x3f80, 0x7f), (0x3f81, 0x80))
        );
        // A NaN of all ones does not become zero.
        assert_eq!(split(0x7fff_ffff), (0x7fff, 0));
    }

    #[test]
    fn stochastic_rounding_is_unbiased_and_stays_between_the_neighbours() {
        for value in [1.0f32, 1.003, -0.3, 1e-30, -7.77e20, 1e-40, 3.3e38] {
            let (low, mut sum) = (f64::from(round_stochastically(value, 0).to_f32()), 0.0);
            for random in 0..=u16::MAX {
                let rounded = round_stochastically(value, random).to_f32();
                sum += f64::from(rounded) - low;
            }
            let (mean, exact) = (sum / 65_536.0, f64::from(value) - low);
            assert!(
                (mean - exact).abs() <= 1e-6 * exact.abs(),
                "{value}: {mean} {exact}"
            );
        }
        for special in [f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(round_stochastically(special, u16::MAX).to_f32(), special);
        }
        assert!(round_stochastically(f32::NAN, u16::MAX).is_nan());
        assert!(round_stochastically(f32::from_bits(0x7f80_0001), 0).is_nan());
    }
}
