//! The data, tokenizer and prompt for a run's evaluations and samples.

use crate::failure::{Failure, Result};
use crate::model_tokens::ModelTokens;
use crate::samples::held_out_options;
use data::{DataError, Dataset};
use settings::{Config, Settings};
use tokenization::Tokenizer;

/// Inputs of evaluations and samples, besides the model.
pub(super) struct EvaluationInputs {
    pub(super) evaluation: Option<Dataset>,
    pub(super) sample: Option<SampleInputs>,
}

/// Inputs for a sample of the model's text.
pub(super) struct SampleInputs {
    pub(super) tokenizer: Tokenizer,
    /// Tokens of the prompt.
    pub(super) prompt: Vec<u32>,
    /// The most tokens of a sample, prompt included, which are planned for.
    pub(super) window: usize,
}

impl EvaluationInputs {
    /// A fingerprint of the data that evaluations read.
    pub(super) fn fingerprint(&self) -> Option<String> {
        self.evaluation.as_ref().map(Dataset::fingerprint)
    }

    /// Opens what the settings ask for. `tokens` are those of the model.
    pub(super) fn open(
        config: &Config,
        settings: &Settings,
        tokens: &ModelTokens,
    ) -> Result<EvaluationInputs> {
        let evaluation = config.eval.every.map(|_| {
            let opened = tokens.open_own(&held_out_options(config)?, config);
            opened.map_err(|error| match (error, &config.eval.path) {
                (Failure::Data(DataError::Missing { .. }), Some(path)) => Failure::Malformed {
                    path: path.clone(),
                    reason: "there is no such file; check --eval-data (eval.path)".into(),
                },
                (error, _) => error,
            })
        });
        let window = settings.between.sample.map(|sample| sample.tokens);
        let sample = window.map(|window| SampleInputs::open(config, window, tokens));
        Ok(EvaluationInputs {
            evaluation: evaluation.transpose()?,
            sample: sample.transpose()?,
        })
    }
}

impl SampleInputs {
    fn open(config: &Config, window: usize, tokens: &ModelTokens) -> Result<SampleInputs> {
        let (model, log) = (&config.model, &config.log);
        let unknown = || {
            Failure::Usage(
                "--sample-every has to know which text the model's tokens stand for, and files of bare tokens do not say: \
                 train on a folder that `trainer prepare` wrote with the tokenizer, start from a model that has \
                 tokenizer.json, or leave --sample-every out"
                    .into(),
            )
        };
        let tokenizer = tokens.tokenizer()?.ok_or_else(unknown)?;
        let mut prompt = tokenizer.encode_prompt(&log.sample_prompt)?;
        prompt.truncate(window);
        let known = |token: &u32| (*token as usize) < model.vocab;
        if prompt.is_empty() || !prompt.iter().all(known) {
            return Err(Failure::Usage(format!(
                "log.sample_prompt = {:?} gives no tokens that the model knows; a sample has to begin with some",
                log.sample_prompt
            )));
        }
        Ok(SampleInputs {
            tokenizer,
            prompt,
            window,
        })
    }
}
