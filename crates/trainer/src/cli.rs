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
        self.resolve_as(None)
    }

    /// As [`Cli::resolve`]; a run is that of the rank that a launcher started, if one did.
    ///
    /// # Errors
    /// As for [`Cli::resolve`].
    pub fn resolve_as(&self, launched: Option<Rank>) -> Result<Resolved, ConfigError> {
        let run = |task, run: &RunArgs, rank, json| {
            let given = Given {
                rank,
                ..run.given()
            };
            resolve(task, given, run.options(json))
        };
        match &self.command {
            None => run(Task::Train, &self.train, launched, false),
            Some(Command::Train(train)) => run(Task::Train, train, launched, false),
            Some(Command::Plan(plan)) => plan.resolve(),
            Some(Command::Profile(profile)) => {
                run(Task::Profile, &profile.run, None, profile.json)
            }
            Some(Command::Tune(tune)) => run(Task::Tune, &tune.run, None, tune.json),
            Some(Command::Init(init)) => init.resolve(),
            Some(Command::Bench(bench)) => {
                run(Task::Train, &bench.run, bench.rank.rank(), bench.form.json)
            }
            Some(Command::Prepare(_)) => Err(ConfigError::Contradiction(
                "`trainer prepare` makes data, and has no configuration of its own".into(),
            )),
            Some(Command::Eval(_) | Command::Generate(_) | Command::Chat(_)) => Err(ConfigError::Contradiction(
                "`trainer eval`, `trainer generate` and `trainer chat` take what a model says, and have no configuration of their own".into(),
            )),
            Some(Command::Export(_)) => Err(ConfigError::Contradiction(
                "`trainer export` takes what a checkpoint says, and has no configuration of its own".into(),
            )),
            Some(Command::Doctor(doctor)) => doctor.resolve(),
            Some(Command::Check(_) | Command::Show(_)) => Err(ConfigError::Contradiction(
                "`trainer check` and `trainer show` read files, and have no configuration of their own".into(),
            )),
            Some(Command::Schema(_)) => Err(ConfigError::Contradiction(
                "`trainer schema` describes files, and has no configuration".into(),
            )),
            Some(Command::Report(_)) => Err(ConfigError::Contradiction(
                "`trainer report` reads the configurations of runs, and has none of its own".into(),
            )),
        }
    }
}
