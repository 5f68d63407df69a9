//! Flags that say how tokens are drawn, of `generate` and `chat`.

use clap::Args;
use session::Sampling;

/// Flags that say how tokens are drawn.
#[derive(Debug, Args)]
pub struct SamplingArgs {
    /// What logits are divided by; 0: the likeliest token every time
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: f32,
    /// Draw among the K likeliest tokens
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u64).range(1..))]
    pub top_k: Option<u64>,
    /// Draw among the likeliest tokens that together have this probability
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = probability, allow_negative_numbers = true)]
    pub top_p: f32,
    /// Seed of the draws
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

impl SamplingArgs {
    pub(crate) fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k.map(|k| k as usize),
            top_p: self.top_p,
            seed: self.seed,
        }
    }
}

fn temperature(text: &str) -> Result<f32, String> {
    let value = text.parse::<f32>().ok();
    let value = value.filter(|value| value.is_finite() && *value >= 0.0);
    value.ok_or_else(|| "a temperature is a number from 0 on".into())
}

fn probability(text: &str) -> Result<f32, String> {
    let value = text.parse::<f32>().ok();
    let value = value.filter(|value| *value > 0.0 && *value <= 1.0);
    value.ok_or_else(|| "a probability is above 0 and at most 1".into())
}
