//! The command line, and how it becomes a configuration.

use crate::args::RunArgs;
pub use crate::commands::Command;
use crate::foreign_flags::{explained, without_parts_of_one};
use clap::Parser;
use memory::Rank;
use settings::{ConfigError, Given, Resolved, Task, preset, resolve};
use std::ffi::OsString;

/// The text of `--version`: the sources and the features of this build (`build.rs`).
const VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (",
    env!("TRAINER_COMMIT"),
    ")\nfeatures: ",
    env!("TRAINER_FEATURES")
);

/// Trains transformers and knows their memory to the byte before the run starts.
///
/// Without a command it trains; without arguments, a small model on the CPU.
#[derive(Debug, Parser)]
#[command(name = "trainer", version, long_version = VERSION, args_conflicts_with_subcommands = true)]
#[command(after_help = preset::help())]
pub struct Cli {
    /// What to do; nothing: train.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// The flags of `train`.
    #[command(flatten)]
    pub train: RunArgs,
}

impl Cli {
    /// Reads the words of a command line, of which the first is the program. A flag of another trainer is answered with the one
    /// here, but for one that divides a model into one part, which changes nothing.
    ///
    /// # Errors
    /// One that is refused, or that asks for help.
    pub fn from_words(words: impl Iterator<Item = OsString>) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(without_parts_of_one(words)).map_err(explained)
    }

    /// The command, its configuration and its options.
    ///
    /// # Errors
    /// A command, flag or setting that is unknown, contradictory, out of range or not built.
    pub fn resolve(&self) -> Result<Resolved, ConfigError> {
        self.resolve_as(None, None)
    }

    /// As [`Cli::resolve`]; a run is that of the rank that a launcher started, if one did, with its number on its machine.
    ///
    /// # Errors
    /// As for [`Cli::resolve`].
    pub fn resolve_as(
        &self,
        rank: Option<Rank>,
        local_rank: Option<usize>,
    ) -> Result<Resolved, ConfigError> {
        let run = |task, run: &RunArgs, json| resolve(task, run.given(), run.options(json));
        let train = |run: &RunArgs| {
            let given = Given {
                rank,
                local_rank,
                ..run.given()
            };
            let resolved = resolve(Task::Train, given, run.options(false))?;
            resolved.config.refuse_policy_from_data()?;
            Ok(resolved)
        };
        match &self.command {
            None => train(&self.train),
            Some(Command::Train(run)) => train(run),
            Some(Command::Plan(plan)) => plan.resolve(),
            Some(Command::Profile(profile)) => run(Task::Profile, &profile.run, profile.json),
            Some(Command::Tune(tune)) => run(Task::Tune, &tune.run, tune.json),
            Some(Command::Init(init)) => init.resolve(),
            Some(other) => Err(ConfigError::Contradiction(format!(
                "`trainer {}` is carried out by itself, not resolved: it takes what a model or each of its strategies says",
                other.name()
            ))),
        }
    }
}
