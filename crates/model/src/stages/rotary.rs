//! The rotary embedding (Su et al. 2021): the table of angles by which queries and keys are turned.

use crate::{Result, RopeScaling};
use kernels::Kernels;
use memory::{Buffer, Category, DType, Memory};

/// The parameters of the angles.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    /// Width of a head. An element of its first half and one of its second are turned as a pair.
    pub head_dim: usize,
    /// Base of the wavelengths.
    pub theta: f64,
    /// How wavelengths are stretched.
    pub scaling: Option<RopeScaling>,
}

impl Rotary {
    /// The table `[2, s, head_dim / 2]` f32 for sequences of `seq` tokens, in memory that lives across steps.
    pub(crate) fn lease(&self, memory: &Memory, kernels: &Kernels, seq: usize) -> Result<Buffer> {
        let shape = [2, seq, self.head_dim / 2];
        let mut table =
            memory.lease_persistent(Category::Parameter, "rotary_table", shape, DType::F32)?;
        if !table.is_shape() {
            kernels.upload(table.view_mut(), bytemuck::cast_slice(&self.table(seq)))?;
        }
        Ok(table)
    }

    /// Cosines `[s, head_dim / 2]`, then sines. An angle is position x frequency, both rounded to f32 first, as in
    /// Hugging Face and PyTorch. The backward pass multiplies by the same values, so gradients are scaled by the
    /// amplitude too.
    fn table(&self, seq: usize) -> Vec<f32> {
        let frequencies = self.frequencies(seq).into_iter();
        let frequencies: Vec<f32> = frequencies.map(|frequency| frequency as f32).collect();
        let angles = (0..seq).flat_map(|position| {
            let frequencies = frequencies.iter();
            frequencies.map(move |frequency| f64::from(position as f32 * frequency))
        });
        let angles: Vec<f64> = angles.collect();
        let amplitude = self.scaling.as_ref().map_or(1.0, RopeScaling::amplitude);
        let cosines = angles.iter().map(|angle| angle.cos());
        let sines = angles.iter().map(|angle| angle.sin());
        let values = cosines.chain(sines).map(|value| amplitude * value);
        values.map(|value| value as f32).collect()
    }

    /// Radians per position of each pair, in sequences of `seq` tokens.
    fn frequencies(&self, seq: usize) -> Vec<f64> {
        let pairs = self.head_dim / 2;
        let plain = (0..pairs).map(|pair| self.theta.powf(-(pair as f64) / pairs as f64));
        let mut frequencies: Vec<f64> = plain.collect();
        if let Some(scaling) = &self.scaling {
            scaling.stretch(&mut frequencies, self.theta, seq);
        }
        frequencies
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rotary(scaling: Option<RopeScaling>) -> Rotary {
        Rotary {
            head_dim: 128,
            theta: 500_000.0,
            scaling,
        }
    }

    #[test]
    fn positions_turn_by_the_base() {
        let table = rotary(None).table(3);
        let sines = &table[3 * 64..];
        assert_eq!((table[0], sines[0]), (1.0, 0.0));
        assert!(
            (table[2 * 64] - 2f32.cos()).abs() < 1e-6,
            "pair 0 turns one radian a position"
        );
        assert!((f64::from(sines[64 + 63]) - 500_000f64.powf(-63.0 / 64.0)).abs() < 1e-9);
    }

    /// The values of Hugging Face transformers' `_compute_llama3_parameters` with Llama-3.1-8B's settings: short
    /// wavelengths are kept, long ones are 8 times as long.
    #[test]
    fn llama3_scaling_keeps_short_and_stretches_long_wavelengths() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 8192,
        };
        let (plain, scaled) = (
            rotary(None).frequencies(3),
            rotary(Some(scaling)).frequencies(3),
        );
        assert_eq!(plain[0], scaled[0]);
        assert!((plain[63] / scaled[63] - 8.0).abs() < 1e-12);
        let between: Vec<f64> = plain
            .iter()
            .zip(&scaled)
            .map(|(plain, scaled)| plain / scaled)
            .collect();
        assert!(
            between.windows(2).all(|pair| pair[0] <= pair[1] + 1e-12),
            "the stretch grows with the wavelength"
        );
        let blended = between
            .iter()
            .filter(|ratio| **ratio > 1.0 + 1e-9 && **ratio < 8.0 - 1e-9)
            .count();
        assert_eq!(blended, 6, "wavelengths from 2048 to 8192 are blended");
    }
}
