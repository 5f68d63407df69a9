//! Text that a model generates while it is trained.

use super::Trainer;
use crate::failure::{Failure, Result};
use session::{Generated, Generation, Sampling};
use settings::SampledText;

impl Trainer {
    /// Continues prompts, of which each has tokens of the vocabulary, with at most `max_tokens` tokens. `ends` end a text; without any, those that the
    /// model's folder names do. What a text draws depends on `sampling`, on its place among the prompts, and on nothing else of the batch.
    ///
    /// # Errors
    /// [`Failure::Usage`] for prompts that were not planned, of which the size is told when the trainer is made ([`Described::make`](super::Described::make)).
    pub fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        max_tokens: usize,
        ends: Option<Vec<u32>>,
        sampling: Sampling,
    ) -> Result<Vec<Generated>> {
        let planned = self.session.awake()?.settings().between.sample;
        let planned = planned.ok_or_else(|| {
            Failure::Usage("this trainer was not planned with texts that it generates; say how many, and how long".into())
        })?;
        self.check_prompts(prompts, max_tokens, planned)?;
        sampling.check().map_err(Failure::Usage)?;
        let wanted = Generation {
            max_tokens,
            window: planned.tokens,
            ends: ends.unwrap_or_else(|| self.ends.clone()),
            sampling,
            uses_cache: true,
        };
        self.enter()?;
        let mut forward = self.session.awake_mut()?.forward()?;
        Ok(forward.generate(prompts, &wanted, |_, _| ())?)
    }

    fn check_prompts(
        &self,
        prompts: &[Vec<u32>],
        max_tokens: usize,
        planned: SampledText,
    ) -> Result {
        let vocab = self.config.model.vocab;
        let refused = |sentence: String| Err(Failure::Usage(sentence));
        if prompts.is_empty() || prompts.len() > planned.sequences {
            return refused(format!(
                "{} prompts are given; this trainer was planned with 1 to {}",
                prompts.len(),
                planned.sequences
            ));
        }
        for (number, prompt) in prompts.iter().enumerate() {
            let most = planned.tokens.min(self.config.data.seq);
            let all = prompt.len().saturating_add(max_tokens);
            if prompt.is_empty() || prompt.len() > most || all > planned.tokens {
                return refused(format!(
                    "prompt {number} has {} tokens, and {max_tokens} more are wanted; this trainer was planned with texts of 1 to {} tokens",
                    prompt.len(),
                    planned.tokens
                ));
            }
            if let Some(token) = prompt.iter().find(|token| **token as usize >= vocab) {
                return refused(format!(
                    "prompt {number} has the token {token}; the model knows tokens from 0 to {}",
                    vocab - 1
                ));
            }
        }
        Ok(())
    }
}
