//! The `generate` command: text from a model.

pub(super) mod prompts;
mod sampling;

use super::trained::{Trained, TrainedArgs, settings};
use crate::failure::{Failure, Result};
use crate::stdout::{print, print_json};
use clap::Args;
use planner::{InferencePlan, PlannedCache};
use prompts::{Prompt, PromptArgs};
pub(super) use sampling::SamplingArgs;
use serde::Serialize;
use session::Generation;
use std::path::PathBuf;
use tokenization::{TextStream, Tokenizer};

/// Flags of `generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// The model.
    #[command(flatten)]
    pub trained: TrainedArgs,
    /// What to go on with.
    #[command(flatten)]
    pub prompts: PromptArgs,
    /// Tokens to make of each prompt, at most
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub max_tokens: usize,
    /// How tokens are drawn.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Read the whole sequence again for every token, instead of keeping keys and values: the same text in f32, while bf16
    /// rounds in another order and the text may differ
    #[arg(long)]
    pub no_cache: bool,
}

/// The output of `generate --json`.
#[derive(Serialize)]
struct Record<'a> {
    model: PathBuf,
    generations: Vec<Continuation<'a>>,
    kv_cache: Option<PlannedCache>,
    peak_bytes: u64,
    planned_peak_bytes: u64,
}

#[derive(Serialize)]
struct Continuation<'a> {
    prompt: &'a str,
    text: String,
    prompt_tokens: usize,
    tokens: Vec<u32>,
    /// `end`: the model ended the text; `length`: there was no room for more tokens.
    finish_reason: &'static str,
}

/// Generates text.
pub(crate) fn generate(args: &GenerateArgs) -> Result {
    let trained = Trained::open(&args.trained, Vec::new())?;
    let tokenizer = trained.tokenizer()?;
    let vocab = trained.completed.config.model.vocab;
    let prompts = args.prompts.read((&trained.folder, vocab), &tokenizer)?;
    let tokens: Vec<Vec<u32>> = prompts.iter().map(|prompt| prompt.tokens.clone()).collect();
    let longest = tokens.iter().map(Vec::len).max().unwrap_or(0);
    let wanted = Generation {
        max_tokens: args.max_tokens,
        window: window(args.max_tokens, longest, trained.positions())?,
        ends: trained.ends(&tokenizer),
        sampling: args.sampling.sampling(),
        uses_cache: !args.no_cache,
    };
    let settings = settings(&trained.completed, wanted.window)?;
    let lengths: Vec<usize> = tokens.iter().map(Vec::len).collect();
    let (mut inference, plan) = trained.load(&settings, |settings, target| {
        InferencePlan::of_generation(settings, target, &lengths, &wanted)
    })?;
    let mut shown = Shown::new(&prompts, &tokenizer, args.trained.json)?;
    let made = inference
        .forward()
        .generate(&tokens, &wanted, |prompt, token| shown.show(prompt, token))?;
    shown.finish()?;
    if !args.trained.json {
        return Ok(());
    }
    let peak = inference.memory().step_memory().peak;
    let generations = prompts.iter().zip(made).map(|(prompt, made)| Continuation {
        prompt: &prompt.said,
        text: tokenizer.decode_after(&prompt.tokens, &made.tokens),
        prompt_tokens: prompt.tokens.len(),
        finish_reason: made.finish_reason(),
        tokens: made.tokens,
    });
    print_json(&Record {
        generations: generations.collect(),
        model: trained.folder,
        kv_cache: plan.kv_cache,
        peak_bytes: peak.bytes,
        planned_peak_bytes: plan.peak_bytes,
    })
}

/// The most tokens of a sequence: what is asked for, limited by the model's positions.
fn window(max_tokens: usize, longest: usize, positions: Option<usize>) -> Result<usize> {
    let wanted = longest.saturating_add(max_tokens);
    let Some(positions) = positions.filter(|positions| wanted > *positions) else {
        return Ok(wanted);
    };
    if longest >= positions {
        return Err(Failure::Usage(format!(
            "a prompt has {longest} tokens, and the model {positions} positions, so none is left to go on; shorten it"
        )));
    }
    tracing::warn!(
        "the model has {positions} positions: texts end there, before --max-tokens {max_tokens}"
    );
    Ok(positions)
}

/// Shows the text as it is generated. With several prompts, all but the first are shown at the end.
struct Shown<'a> {
    prompts: &'a [Prompt],
    tokenizer: &'a Tokenizer,
    stream: Option<TextStream<'a>>,
    later: Vec<Vec<u32>>,
    outcome: Result,
}

impl<'a> Shown<'a> {
    fn new(prompts: &'a [Prompt], tokenizer: &'a Tokenizer, is_json: bool) -> Result<Shown<'a>> {
        if !is_json {
            print(prompts[0].heading())?;
        }
        Ok(Shown {
            prompts,
            tokenizer,
            stream: (!is_json).then(|| tokenizer.stream_after(&prompts[0].tokens)),
            later: vec![Vec::new(); prompts.len()],
            outcome: Ok(()),
        })
    }

    fn show(&mut self, prompt: usize, token: u32) {
        match &mut self.stream {
            Some(stream) if prompt == 0 => {
                let text = stream.push(token);
                if self.outcome.is_ok() {
                    self.outcome = print(text);
                }
            }
            _ => self.later[prompt].push(token),
        }
    }

    fn finish(self) -> Result {
        self.outcome?;
        let Some(stream) = self.stream else {
            return Ok(());
        };
        print(format_args!("{}\n", stream.finish()))?;
        for (prompt, tokens) in self.prompts.iter().zip(&self.later).skip(1) {
            let text = self.tokenizer.decode_after(&prompt.tokens, tokens);
            print(format_args!("\n{}{text}\n", prompt.heading()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_ends_where_the_positions_do() {
        assert_eq!(window(10, 5, None).unwrap(), 15);
        assert_eq!(window(10, 5, Some(15)).unwrap(), 15);
        assert_eq!(window(11, 5, Some(15)).unwrap(), 15);
        let error = window(1, 15, Some(15)).unwrap_err().to_string();
        assert!(
            error.contains("15 tokens") && error.contains("15 positions"),
            "{error}"
        );
    }
}
