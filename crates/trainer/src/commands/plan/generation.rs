//! `plan --generate`: the memory that a model needs to generate text.

use crate::commands::trained::settings;
use crate::failure::Result;
use crate::stdout::{print, print_json};
use clap::Args;
use planner::InferencePlan;
use settings::Resolved;

/// Flags of `plan` for generation.
#[derive(Clone, Debug, Default, Args)]
pub struct GenerationArgs {
    /// Plan text of so many tokens, prompt included, instead of training
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..))]
    pub generate: Option<u64>,
    /// Sequences that grow together
    #[arg(long, value_name = "B", requires = "generate", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub batch: u64,
}

/// Prints the memory that a model needs to generate.
pub(crate) fn print_generation_plan(resolved: &Resolved, tokens: u64, batch: u64) -> Result {
    let settings = settings(resolved, tokens as usize)?;
    let sequences = (batch as usize, tokens as usize);
    let plan = InferencePlan::of_sequences(&settings, resolved.device().target(), sequences)?;
    match resolved.options.json {
        true => print_json(&plan),
        false => print(plan),
    }
}
