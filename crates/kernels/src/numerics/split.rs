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
