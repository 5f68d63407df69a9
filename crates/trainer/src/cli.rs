//! The command line, and how it becomes a configuration.

use crate::args::RunArgs;
pub use crate::commands::Command;
use crate::foreign_flags::{explained, without_parts_of_one};
use clap::Parser;
use memory::Rank;
use settings::{ConfigError, Given, Resolved, Task, preset, resolve};

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
    /// Reads the process's command line. One that is refused ends the process with exit code 2; a flag of another trainer is
    /// answered with the one here, but for one that divides a model into one part, which changes nothing.
    pub fn from_command_line() -> Cli {
        let arguments = without_parts_of_one(std::env::args_os());
        Cli::try_parse_from(arguments).unwrap_or_else(|error| explained(error).exit())
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
            resolve(Task::Train, given, run.options(false))
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
