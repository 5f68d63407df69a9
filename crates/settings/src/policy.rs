//! A policy that is learnt by its gradient, and what does not go with it.

use super::choices::Objective;
use super::error::ConfigError;
use super::schema::Config;
use crate::Result;
use data::Packing;

impl Config {
    /// Whether a policy is learnt, whose targets come with their log-probabilities and advantages.
    pub fn has_policy(&self) -> bool {
        self.train.objective == Objective::Policy
    }

    /// Refuses to train a policy on data: no data has what its steps take.
    ///
    /// # Errors
    /// If a policy is learnt.
    pub fn refuse_policy_from_data(&self) -> Result {
        match self.has_policy() {
            true => refused(
                "--objective policy has no data to train on: a program writes the texts, and passes them with their advantages to \
                 `Trainer::policy_step` of the library, or to Python's `policy_step`; `trainer plan --objective policy` predicts its memory",
            ),
            false => Ok(()),
        }
    }
}

fn refused(sentence: &str) -> Result {
    Err(ConfigError::Contradiction(sentence.into()))
}

/// Refuses what does not go with a policy.
pub(crate) fn check(config: &Config) -> Result {
    if !config.has_policy() {
        return Ok(());
    }
    if config.packing() != Packing::Concatenate {
        return refused(
            "--objective policy has rows of data.seq tokens, whose ends are masked, and data.packing says how documents become rows; \
             leave --packing out",
        );
    }
    if config.eval.every.is_some() {
        return refused(
            "--objective policy has no data to evaluate on between steps; leave --eval-every out, and watch `policy_kl` and \
             `policy_clip_share` of each step",
        );
    }
    Ok(())
}

/// Refuses a policy for routers that have losses of their own.
pub(crate) fn check_model(config: &Config) -> Result {
    if config.has_policy() && config.model.router_losses().is_some() {
        return refused(
            "--objective policy beside routers' losses is not built; set model.router_aux and model.router_z_loss to 0",
        );
    }
    Ok(())
}
