//! The trainer: the command line, the training loop, run directories, and what a machine offers for training.
//!
//! A command line becomes [`settings::Resolved`], which [`carry_out`] executes with [`planner`] and [`session`]. The
//! binary is a thin wrapper. `Trainer` (feature `candle`, on by default) is for programs with candle's tensors.

mod adapters;
#[cfg(feature = "cuda")]
mod algorithms;
mod args;
mod begin;
#[cfg(feature = "cuda")]
mod caches;
mod checkpoints;
pub mod cli;
mod commands;
mod decisions;
mod device;
pub mod failure;
mod foreign;
mod foreign_flags;
mod gpu_watch;
mod initial_model;
mod interrupt;
mod job;
mod kernel_kinds;
#[cfg(feature = "cuda")]
mod kernel_trial;
mod key_flags;
mod last_words;
mod leftovers;
#[cfg(feature = "candle")]
mod library;
mod limits;
pub mod log;
mod model_tokens;
pub mod program;
mod reference;
mod run_dir;
mod samples;
mod shell;
mod stdout;
mod threads;
mod tracer;
mod train;
mod whole_model;

pub use data::MASKED;
pub use failure::{Failure, Result};
pub use job::FailedCommand;
pub use kernels::Target;
#[cfg(feature = "candle")]
pub use library::{
    Described, Handed, PolicyBatch, PolicyLoss, PolicyLossKind, SleepLevel, TokenRows, Trainer,
    WeightInPlace, configuration, configuration_from_text,
};
pub use memory::DType;
pub use planner::{Fix, Plan};
pub use report::StepRecord;
pub use session::{Generated, PolicyNumbers, Sampling, StepOutcome, WhichModel};
pub use settings::{BetweenSteps, Config, SampledText, Settings};

use cli::{Cli, Command};
use collectives::Launch;
use memory::Rank;
use std::ffi::OsString;

/// Carries out the words of a command line, of which the first is the program, and returns the exit code. Words that are refused, or ask
/// for help, end the process.
pub fn command(words: impl Iterator<Item = OsString>) -> u8 {
    // If the launcher's variables make no sense, the command that needs them reports it.
    let launch = Launch::from_environment().ok().flatten();
    log::begin(launch.map(|launch| launch.rank));
    let cli = Cli::from_words(words).unwrap_or_else(|refused| refused.exit());
    match carry_out(&cli) {
        Ok(()) => 0,
        Err(ended) => ended.tell_and_leave(),
    }
}

/// Executes a command line.
///
/// # Errors
/// [`FailedCommand`], with its failure.
pub fn carry_out(cli: &Cli) -> Result<(), FailedCommand> {
    interrupt::outlive_file_size_limit()?;
    limits::allow_many_files();
    #[cfg(feature = "cuda")]
    kernel_trial::this_program_has_the_command();
    match &cli.command {
        None | Some(Command::Train(_)) => train(cli),
        Some(Command::Doctor(args)) => commands::doctor(args, launch()?.as_ref()),
        // The process of a rank's trial is no rank.
        #[cfg(feature = "cuda")]
        Some(command @ Command::TryKernels(_)) => Ok(command.carry_out(None, || cli.resolve())?),
        Some(command) => Ok(command.carry_out(launch()?, || cli.resolve())?),
    }
}

/// Trains, as the rank that the launcher says, if any.
fn train(cli: &Cli) -> Result<(), FailedCommand> {
    // A single process needs no library, and forms a group only if the configuration asks for one.
    let launch = launch()?.filter(|launch| launch.size > 1);
    let rank = launch.as_ref().map(|launch| Rank {
        number: launch.rank,
        of: launch.size,
    });
    let local_rank = launch.as_ref().map(|launch| launch.local_rank);
    train::train(cli.resolve_as(rank, local_rank)?, launch.as_ref())
}

fn launch() -> Result<Option<Launch>> {
    Ok(Launch::from_environment()?)
}
