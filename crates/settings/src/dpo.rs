//! Preferences between pairs of sequences, and what does not go with them.

use super::choices::{DpoLoss, Objective};
use super::error::ConfigError;
use super::keys::DpoConfig;
use super::schema::Config;
use crate::Result;
use data::Packing;

impl Default for DpoConfig {
    fn default() -> DpoConfig {
        DpoConfig {
            beta: 0.1,
            loss: DpoLoss::Sigmoid,
            reference: None,
        }
    }
}

impl Config {
    /// Whether every two sequences are a pair, of which one is preferred.
    pub fn has_pairs(&self) -> bool {
        self.train.objective == Objective::Dpo
    }

    /// How documents become rows. `auto` is resolved here as if there were no data.
    pub fn packing(&self) -> Packing {
        match self.data.packing {
            Packing::Auto if self.has_pairs() => Packing::Pad,
            Packing::Auto => Packing::Concatenate,
            packing => packing,
        }
    }
}

/// Refuses what does not go with preferences.
pub(crate) fn check(config: &Config) -> Result {
    if !config.has_pairs() {
        return Ok(());
    }
    let refused = |sentence: String| Err(ConfigError::Contradiction(sentence));
    if config.packing() != Packing::Pad {
        return refused(format!(
            "--objective dpo learns from pairs of documents, each a sequence of its own, and data.packing is {}; leave it out, or take --packing pad",
            config.data.packing
        ));
    }
    if !config.batch.micro.is_multiple_of(2) {
        return refused(format!(
            "--objective dpo has two sequences for every pair, and batch.micro is {}; make --micro-batch even",
            config.batch.micro
        ));
    }
    if config.lora.rank.is_none() && config.dpo.reference.is_none() {
        return refused(
            "--objective dpo compares the model with the one that it began as, which is lost when all of it is trained; train \
             adapters (--lora RANK), or write down what that model thinks of the data with `trainer eval MODEL --data DATA \
             --reference FILE`, and name the file: --set dpo.reference=FILE"
                .into(),
        );
    }
    if config.eval.every.is_some() {
        return refused(
            "evaluations of preferences while training are not built; leave --eval-every out, and watch `rewards_accuracy` in \
             metrics.jsonl"
                .into(),
        );
    }
    Ok(())
}

/// Refuses preferences for routers that have losses of their own.
pub(crate) fn check_model(config: &Config) -> Result {
    if config.has_pairs() && config.model.router_losses().is_some() {
        return Err(ConfigError::Contradiction(
            "--objective dpo beside routers' losses is not built; set model.router_aux and model.router_z_loss to 0".into(),
        ));
    }
    Ok(())
}
