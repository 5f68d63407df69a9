//! How the rotary embedding's wavelengths are stretched for sequences longer than those of the original training.

use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

/// A kind of stretching, by its name in Hugging Face's files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum RopeScaling {
    /// All wavelengths by the same factor: positions are divided by it (Chen et al. 2023).
    Linear {
        /// How far all wavelengths are stretched.
        factor: f64,
    },
    /// Llama 3.1's kind. Wavelengths longer than `original_max_position / low_freq_factor` are stretched by `factor`,
    /// those shorter than `original_max_position / high_freq_factor` are kept, and those between are blended.
    Llama3 {
        /// How far long wavelengths are stretched.
        factor: f64,
        /// Upper end of the stretched wavelengths.
        low_freq_factor: f64,
        /// Lower end of the blended wavelengths.
        high_freq_factor: f64,
        /// Context length of the original training.
        original_max_position: usize,
    },
    /// YaRN (Peng et al. 2023). Pairs that turn more than `beta_fast` times within the original context are kept, those
    /// that turn less than `beta_slow` times are stretched, and those between are blended by their number. Cosines and
    /// sines are multiplied by a factor.
    Yarn {
        /// How far long wavelengths are stretched.
        factor: f64,
        /// Context length of the original training.
        original_max_position: usize,
        /// Pairs with at least this many turns are kept.
        #[serde(default = "default_beta_fast")]
        beta_fast: f64,
        /// Turns up to which pairs are stretched.
        #[serde(default = "default_beta_slow")]
        beta_slow: f64,
        /// Factor of cosines and sines; none: `0.1 ln(factor) + 1`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attention_factor: Option<f64>,
        /// Under latent attention, scores are multiplied by the square of 0.1 times it times ln(factor), plus 1.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mscale_all_dim: Option<f64>,
        /// Whether the ends of the blended pairs are rounded outwards to whole pairs.
        #[serde(default = "default_truncate")]
        truncate: bool,
    },
    /// LongRoPE (Ding et al. 2024). The wavelength of each pair is stretched by a factor of its own: a short one for sequences of
    /// at most `original_max_position` tokens, else a long one.
    #[serde(rename = "longrope")]
    LongRope {
        /// How far the context is stretched.
        factor: f64,
        /// Context length of the original training.
        original_max_position: usize,
        /// A factor for each pair, in sequences that are no longer than that.
        short_factor: Vec<f64>,
        /// A factor for each pair, in longer ones.
        long_factor: Vec<f64>,
        /// Factor of cosines and sines, however long a sequence; none: `sqrt(1 + ln(factor) / ln(original_max_position))`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attention_factor: Option<f64>,
    },
}

fn default_beta_fast() -> f64 {
    32.0
}

fn default_beta_slow() -> f64 {
    1.0
}

fn default_truncate() -> bool {
    true
}

/// The factor on cosines and sines that the paper suggests for YaRN, if `weight` is 1.
pub(crate) fn yarn_attention_factor(factor: f64, weight: f64) -> f64 {
    match factor > 1.0 {
        true => 0.1 * weight * factor.ln() + 1.0,
        false => 1.0,
    }
}

/// The factor on cosines and sines that the paper suggests for LongRoPE.
fn long_attention_factor(factor: f64, original_max_position: usize) -> f64 {
    match factor > 1.0 {
        true => (1.0 + factor.ln() / (original_max_position as f64).ln()).sqrt(),
        false => 1.0,
    }
}

impl RopeScaling {
    /// The names of the kinds.
    pub const KINDS: &'static [&'static str] = &["llama3", "linear", "yarn", "longrope"];

    /// The keys that a kind needs, and its optional ones.
    pub fn keys(kind: &str) -> [&'static [&'static str]; 2] {
        match kind {
            "linear" => [&["factor"], &[]],
            "longrope" => [
                &[
                    "factor",
                    "original_max_position",
                    "short_factor",
                    "long_factor",
                ],
                &["attention_factor"],
            ],
            "yarn" => [
                &["factor", "original_max_position"],
                &[
                    "beta_fast",
                    "beta_slow",
                    "attention_factor",
                    "mscale_all_dim",
                    "truncate",
                ],
            ],
            _ => [
                &[
                    "factor",
                    "low_freq_factor",
                    "high_freq_factor",
                    "original_max_position",
                ],
                &[],
            ],
        }
    }

    /// How far the longest wavelengths are stretched.
    pub fn factor(&self) -> f64 {
        match self {
            RopeScaling::Linear { factor }
            | RopeScaling::Llama3 { factor, .. }
            | RopeScaling::Yarn { factor, .. }
            | RopeScaling::LongRope { factor, .. } => *factor,
        }
    }

    /// Context length of the original training, if the kind has it.
    pub fn original_max_position(&self) -> Option<usize> {
        match self {
            RopeScaling::Linear { .. } => None,
            RopeScaling::Llama3 {
                original_max_position,
                ..
            }
            | RopeScaling::Yarn {
                original_max_position,
                ..
            }
            | RopeScaling::LongRope {
                original_max_position,
                ..
            } => Some(*original_max_position),
        }
    }

    /// The lists that have a factor for each pair, by their keys.
    pub(crate) fn by_pair(&self) -> Vec<(&'static str, &[f64])> {
        match self {
            RopeScaling::LongRope {
                short_factor,
                long_factor,
                ..
            } => vec![("short_factor", short_factor), ("long_factor", long_factor)],
            _ => Vec::new(),
        }
    }

    /// The numbers that must be finite and above 0, by their keys.
    pub(crate) fn positive(&self) -> Vec<(&'static str, f64)> {
        let mut positive = vec![("rope_scaling.factor", self.factor())];
        let original = self.original_max_position();
        positive.extend(original.map(|most| ("rope_scaling.original_max_position", most as f64)));
        match self {
            RopeScaling::Linear { .. } => {}
            RopeScaling::Llama3 {
                low_freq_factor,
                high_freq_factor,
                ..
            } => positive.extend([
                ("rope_scaling.low_freq_factor", *low_freq_factor),
                (
                    "rope_scaling.high_freq_factor - low_freq_factor",
                    high_freq_factor - low_freq_factor,
                ),
            ]),
            RopeScaling::Yarn {
                beta_fast,
                beta_slow,
                attention_factor,
                ..
            } => {
                positive.extend([
                    ("rope_scaling.beta_slow", *beta_slow),
                    (
                        "rope_scaling.attention_factor",
                        attention_factor.unwrap_or(1.0),
                    ),
                ]);
                // Where they are equal, as in Kimi K2, no pair or one is blended.
                let range = ("rope_scaling.beta_fast - beta_slow", beta_fast - beta_slow);
                positive.extend((beta_fast != beta_slow).then_some(range));
            }
            RopeScaling::LongRope {
                short_factor,
                long_factor,
                attention_factor,
                ..
            } => {
                let short = short_factor.iter();
                positive.extend(short.map(|it| ("rope_scaling.short_factor", *it)));
                let long = long_factor.iter();
                positive.extend(long.map(|it| ("rope_scaling.long_factor", *it)));
                positive.extend(attention_factor.map(|it| ("rope_scaling.attention_factor", it)));
            }
        }
        positive
    }

    /// The factor on cosines and sines.
    pub(crate) fn amplitude(&self) -> f64 {
        match self {
            RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } => 1.0,
            RopeScaling::Yarn {
                factor,
                attention_factor,
                ..
            } => attention_factor.unwrap_or_else(|| yarn_attention_factor(*factor, 1.0)),
            RopeScaling::LongRope {
                factor,
                original_max_position,
                attention_factor,
                ..
            } => attention_factor
                .unwrap_or_else(|| long_attention_factor(*factor, *original_max_position)),
        }
    }

    /// The factor on the scores of latent attention, beside 1 / sqrt(head_dim).
    pub(crate) fn score_factor(&self) -> f64 {
        match self {
            RopeScaling::Yarn {
                factor,
                mscale_all_dim: Some(weight),
                ..
            } => yarn_attention_factor(*factor, *weight).powi(2),
            _ => 1.0,
        }
    }

    /// The same, where the ends of YaRN's blended pairs are rounded.
    pub(crate) fn truncated(mut self) -> RopeScaling {
        if let RopeScaling::Yarn { truncate, .. } = &mut self {
            *truncate = true;
        }
        self
    }

    /// Stretches `frequencies`, radians per position of each pair, which were made from the base `theta`, for sequences of
    /// `seq` tokens.
    pub(crate) fn stretch(&self, frequencies: &mut [f64], theta: f64, seq: usize) {
        let pairs = frequencies.len() as f64;
        for (pair, frequency) in frequencies.iter_mut().enumerate() {
            *frequency *= match self {
                RopeScaling::Linear { factor } => 1.0 / factor,
                RopeScaling::Llama3 {
                    factor,
                    low_freq_factor,
                    high_freq_factor,
                    original_max_position,
                } => {
                    let turns = *original_max_position as f64 * *frequency / (2.0 * PI);
                    let blend = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    kept_and_stretched(blend, *factor)
                }
                RopeScaling::Yarn { factor, .. } => {
                    let [first, last] = self.blended_pairs(pairs, theta);
                    kept_and_stretched(1.0 - (pair as f64 - first) / (last - first), *factor)
                }
                RopeScaling::LongRope {
                    original_max_position,
                    short_factor,
                    long_factor,
                    ..
                } => match seq > *original_max_position {
                    true => 1.0 / long_factor[pair],
                    false => 1.0 / short_factor[pair],
                },
            };
        }
    }

    /// The pairs between which YaRN blends: those that turn `beta_fast` and `beta_slow` times within the original
    /// context.
    fn blended_pairs(&self, pairs: f64, theta: f64) -> [f64; 2] {
        let RopeScaling::Yarn {
            original_max_position,
            beta_fast,
            beta_slow,
            truncate,
            ..
        } = self
        else {
            unreachable!("the others blend by wavelengths");
        };
        let original = *original_max_position as f64;
        let pair = |turns: f64| pairs * (original / (turns * 2.0 * PI)).ln() / theta.ln();
        let [first, last] = match truncate {
            true => [pair(*beta_fast).floor(), pair(*beta_slow).ceil()],
            false => [pair(*beta_fast), pair(*beta_slow)],
        };
        // As in transformers, the last may lie beyond the pairs, and the two always differ.
        let (first, last) = (first.max(0.0), last.min(2.0 * pairs - 1.0));
        [first, if first == last { last + 0.001 } else { last }]
    }
}

/// The factor on a frequency of which a share is kept, and the rest divided by `factor`.
fn kept_and_stretched(share: f64, factor: f64) -> f64 {
    let kept = share.clamp(0.0, 1.0);
    kept + (1.0 - kept) / factor
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How far the wavelength of each of 16 pairs is stretched, with base 10,000.
    fn stretches(scaling: &RopeScaling) -> Vec<f64> {
        let plain = (0..16).map(|pair| 10_000f64.powf(-f64::from(pair) / 16.0));
        let plain: Vec<f64> = plain.collect();
        let mut stretched = plain.clone();
        scaling.stretch(&mut stretched, 10_000.0, 1);
        let ratios = plain.iter().zip(stretched);
        ratios.map(|(plain, stretched)| plain / stretched).collect()
    }

    /// The values of `_compute_yarn_parameters` of transformers 5.23.
    #[test]
    fn yarn_is_that_of_transformers() {
        let yarn = |beta_fast, beta_slow, truncate| RopeScaling::Yarn {
            factor: 8.0,
            original_max_position: 512,
            beta_fast,
            beta_slow,
            attention_factor: None,
            mscale_all_dim: None,
            truncate,
        };
        let plain = yarn(32.0, 1.0, true);
        assert!((plain.amplitude() - 1.2079441541679836).abs() < 1e-12);
        for (scaling, blended) in [
            (plain, [1.0, 1.14286, 1.33333, 1.6, 2.0, 2.66667, 4.0, 8.0]),
            (
                yarn(1.0, 1.0, true),
                [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 8.0],
            ),
            (
                yarn(16.0, 2.0, false),
                [1.0, 1.0, 1.04351, 1.39648, 2.11032, 4.3171, 8.0, 8.0],
            ),
        ] {
            let found = stretches(&scaling);
            assert_eq!(found[0], 1.0);
            for (found, expected) in found[1..9].iter().zip(blended) {
                assert!((found - expected).abs() < 1e-5, "{found} {expected}");
            }
            assert!(found[9..].iter().all(|found| (found - 8.0).abs() < 1e-12));
        }
    }

    #[test]
    fn linear_stretches_all_alike() {
        let stretches = stretches(&RopeScaling::Linear { factor: 4.0 });
        assert!(stretches.iter().all(|stretch| *stretch == 4.0));
    }
}
