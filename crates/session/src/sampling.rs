//! Draws the next token from the model's distribution.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::cmp::Ordering;

/// How tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by this; with 0 the likeliest token is always taken.
    pub temperature: f32,
    /// Only this many of the likeliest tokens can be drawn; `None`: all.
    pub top_k: Option<usize>,
    /// Only the likeliest tokens that together reach this probability can be drawn (Holtzman et al. 2019); 1: all.
    pub top_p: f32,
    /// The seed of the draws.
    pub seed: u64,
}

impl Sampling {
    /// Takes the likeliest token every time.
    pub const GREEDY: Sampling = Sampling {
        temperature: 0.0,
        top_k: None,
        top_p: 1.0,
        seed: 0,
    };

    /// Why no token can be drawn like this, if so.
    ///
    /// # Errors
    /// A sentence.
    pub fn check(&self) -> Result<(), String> {
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return Err("a temperature is a number from 0 on".into());
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err("a probability (top_p) is above 0 and at most 1".into());
        }
        match self.top_k {
            Some(0) => Err("top_k is at least 1".into()),
            _ => Ok(()),
        }
    }
}

/// The draws of one sequence. They depend only on the seed and on the sequence's number among the prompts.
pub(crate) struct Sampler {
    sampling: Sampling,
    random: ChaCha8Rng,
}

/// A token and its logit, which is later replaced by its weight.
type Candidate = (usize, f64);

/// The likelier one first; of equal ones the smaller id.
fn likelier(a: &Candidate, b: &Candidate) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

impl Sampler {
    pub(crate) fn new(sampling: Sampling, number: usize) -> Sampler {
        let mut random = ChaCha8Rng::seed_from_u64(sampling.seed);
        random.set_stream(number as u64);
        Sampler { sampling, random }
    }

    /// Draws the next token. Logits must be finite.
    pub(crate) fn draw(&mut self, logits: &[f32]) -> u32 {
        let logits = logits.iter().map(|logit| f64::from(*logit));
        let mut candidates: Vec<Candidate> = logits.enumerate().collect();
        let best = candidates.iter().copied().min_by(likelier);
        let best = best.expect("a vocabulary has tokens");
        // One random number for each token, even if it is not used.
        let unit = (self.random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        if self.sampling.temperature == 0.0 {
            return best.0 as u32;
        }
        self.keep_likeliest(&mut candidates);
        let temperature = f64::from(self.sampling.temperature);
        for (_, weight) in &mut candidates {
            *weight = ((*weight - best.1) / temperature).exp();
        }
        pick(&self.nucleus(candidates), unit)
    }

    fn keep_likeliest(&self, candidates: &mut Vec<Candidate>) {
        let most = self.sampling.top_k.map_or(candidates.len(), |k| k.max(1));
        if most < candidates.len() {
            candidates.select_nth_unstable_by(most, likelier);
            candidates.truncate(most);
        }
        candidates.sort_unstable_by(likelier);
    }

    /// The fewest candidates, likeliest first, whose weights reach `top_p` of the sum.
    fn nucleus(&self, mut candidates: Vec<Candidate>) -> Vec<Candidate> {
        let top_p = f64::from(self.sampling.top_p);
        if top_p < 1.0 {
            let wanted = top_p * weight(&candidates);
            let mut sum = 0.0;
            let before = candidates.iter().take_while(|(_, weight)| {
                sum += weight;
                sum < wanted
            });
            let kept = before.count() + 1;
            candidates.truncate(kept);
        }
        candidates
    }
}

fn weight(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|(_, weight)| weight).sum()
}

/// The candidate into whose share of the weight a number from 0 to 1 falls.
fn pick(candidates: &[Candidate], unit: f64) -> u32 {
    let mut left = unit * weight(candidates);
    let hit = candidates.iter().find(|(_, weight)| {
        left -= weight;
        left < 0.0
    });
    // Rounding may leave a little weight after the last one.
    hit.unwrap_or(&candidates[candidates.len() - 1]).0 as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [0.0, 2.0, -1e30, 1.0, 2.0];

    fn shares(sampling: Sampling) -> [f64; 5] {
        let (mut sampler, draws) = (Sampler::new(sampling, 3), 20_000);
        let mut shares = [0.0; 5];
        for _ in 0..draws {
            shares[sampler.draw(&LOGITS) as usize] += 1.0 / f64::from(draws);
        }
        shares
    }

    #[track_caller]
    fn near(shares: [f64; 5], expected: [f64; 5]) {
        let within = |(a, b): (&f64, &f64)| (a - b).abs() < 0.015;
        assert!(
            shares.iter().zip(&expected).all(within),
            "{shares:?} {expected:?}"
        );
    }

    fn sampling() -> Sampling {
        Sampling {
            temperature: 1.0,
            ..Sampling::GREEDY
        }
    }

    #[test]
    fn tokens_come_as_often_as_the_model_says() {
        let e = std::f64::consts::E;
        let sum = 1.0 + e + 2.0 * e * e;
        near(
            shares(sampling()),
            [1.0 / sum, e * e / sum, 0.0, e / sum, e * e / sum],
        );
        let hot = Sampling {
            temperature: 1e6,
            ..sampling()
        };
        near(shares(hot), [0.25, 0.25, 0.0, 0.25, 0.25]);
    }

    #[test]
    fn top_k_and_top_p_leave_the_likeliest() {
        let top_k = Sampling {
            top_k: Some(2),
            ..sampling()
        };
        near(shares(top_k), [0.0, 0.5, 0.0, 0.0, 0.5]);
        let first = Sampling {
            top_k: Some(1),
            ..sampling()
        };
        near(shares(first), [0.0, 1.0, 0.0, 0.0, 0.0]);
        // The two likeliest have 80 % of the probability, the first alone 40 %.
        for (top_p, expected) in [
            (0.5, [0.0, 0.5, 0.0, 0.0, 0.5]),
            (0.3, [0.0, 1.0, 0.0, 0.0, 0.0]),
        ] {
            near(
                shares(Sampling {
                    top_p,
                    ..sampling()
                }),
                expected,
            );
        }
    }

    #[test]
    fn greedy_takes_the_first_of_the_likeliest() {
        assert_eq!(Sampler::new(Sampling::GREEDY, 0).draw(&LOGITS), 1);
    }

    #[test]
    fn draws_depend_on_seed_and_prompt_alone() {
        let draws = |seed, number| -> Vec<u32> {
            let sampling = Sampling { seed, ..sampling() };
            let mut sampler = Sampler::new(sampling, number);
            (0..40).map(|_| sampler.draw(&LOGITS)).collect()
        };
        assert_eq!(draws(1, 0), draws(1, 0));
        assert_ne!(draws(1, 0), draws(2, 0));
        assert_ne!(draws(1, 0), draws(1, 1));
    }
}
