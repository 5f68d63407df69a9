//! The rotary embedding (Su et al. 2021): the table of angles by which queries and keys are turned.

use crate::{Result, RopeScaling};
use kernels::Kernels;
use memory::{Buffer, Category, DType, Memory};
use std::ops::Range;

/// The parameters of the angles.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    /// Columns of a head that are turned: the first ones. An element of their first half and one of their second are turned as a
    /// pair.
    pub columns: usize,
    /// Base of the wavelengths.
    pub theta: f64,
    /// How wavelengths are stretched.
    pub scaling: Option<RopeScaling>,
    /// What turned queries are multiplied by.
    pub temperature: Option<Temperature>,
}

/// Queries at a position are multiplied by `1 + beta ln(1 + floor(position / original))` (Llama 4, Ministral 3), so that attention
/// stays sharp over many keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temperature {
    /// How fast it grows.
    pub beta: f64,
    /// Positions up to which it is 1.
    pub original: usize,
}

impl Temperature {
    fn at(self, position: usize) -> f64 {
        1.0 + self.beta * ((position / self.original) as f64).ln_1p()
    }
}

/// The tables of a rotary embedding, `[2, rows, columns / 2]` f32: cosines, then sines. There is a row for each position. If long
/// sequences are stretched by other factors than short ones, rows for short ones follow ([`Rotary::short_rows`]).
pub(crate) struct RotaryTables {
    /// That of keys, and of queries unless they have their own.
    pub(crate) keys: Buffer,
    /// That of queries, if their temperature is not 1 at all positions.
    pub(crate) queries: Option<Buffer>,
}

impl Rotary {
    /// The tables for sequences of `seq` tokens, in memory that lives across steps.
    pub(crate) fn lease(
        &self,
        memory: &Memory,
        kernels: &Kernels,
        seq: usize,
    ) -> Result<RotaryTables> {
        let of = |name, temperature: Option<Temperature>| -> Result<Buffer> {
            let shape = [2, seq + self.short_rows(seq), self.columns / 2];
            let mut table =
                memory.lease_persistent(Category::Parameter, name, shape, DType::F32)?;
            if !table.is_shape() {
                let values = self.table(seq, temperature);
                kernels.upload(table.view_mut(), bytemuck::cast_slice(&values))?;
            }
            Ok(table)
        };
        let temperature = self.temperature.filter(|it| seq > it.original);
        Ok(RotaryTables {
            keys: of("rotary_table", None)?,
            queries: match temperature {
                Some(temperature) => Some(of("rotary_table_of_queries", Some(temperature))?),
                None => None,
            },
        })
    }

    /// Rows of LongRoPE's short factors, behind the `seq` rows of the long ones; 0 if the table has one kind.
    pub(crate) fn short_rows(&self, seq: usize) -> usize {
        match &self.scaling {
            Some(RopeScaling::LongRope {
                original_max_position: original,
                ..
            }) if seq > *original => *original,
            _ => 0,
        }
    }

    /// Cosines `[rows, columns / 2]`, then sines. An angle is position x frequency, both rounded to f32 first, as in
    /// Hugging Face and PyTorch. The backward pass multiplies by the same values, so gradients are scaled by the
    /// amplitude, and by the temperature of queries, too.
    fn table(&self, seq: usize, temperature: Option<Temperature>) -> Vec<f32> {
        let amplitude = self.scaling.as_ref().map_or(1.0, RopeScaling::amplitude);
        let short = self.short_rows(seq);
        let factors = [seq, short].map(|seq| {
            let frequencies = self.frequencies(seq).into_iter();
            frequencies.map(|it| it as f32).collect::<Vec<f32>>()
        });
        let [long_rows, short_rows] = [(0..seq, &factors[0]), (0..short, &factors[1])];
        let rows = || {
            let of = |(positions, frequencies): (Range<usize>, _)| {
                positions.map(move |position| (position, frequencies))
            };
            of(long_rows.clone()).chain(of(short_rows.clone()))
        };
        let values = |of: fn(f64) -> f64| {
            rows().flat_map(move |(position, frequencies): (usize, &Vec<f32>)| {
                let factor = temperature.map_or(1.0, |temperature| temperature.at(position));
                let value = move |frequency: &f32| {
                    amplitude * factor * of(f64::from(position as f32 * frequency))
                };
                frequencies.iter().map(move |it| value(it) as f32)
            })
        };
        values(f64::cos).chain(values(f64::sin)).collect()
    }

    /// Radians per position of each pair, in sequences of `seq` tokens.
    fn frequencies(&self, seq: usize) -> Vec<f64> {
        let pairs = self.columns / 2;
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
            columns: 128,
            theta: 500_000.0,
            scaling,
            temperature: None,
        }
    }

    #[test]
    fn positions_turn_by_the_base() {
        let table = rotary(None).table(3, None);
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
