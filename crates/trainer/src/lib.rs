//! The trainer: the command line, the training loop, run directories, and what a machine offers.
//!
//! A command line becomes [`settings::Resolved`], which [`run`] carries out with [`planner`] and [`session`]. The binary is
//! a thin shell around it.

mod args;
mod bench;
pub mod cli;
mod device;
mod doctor;
pub mod failure;
mod initialise;
mod interrupt;
mod key_flags;
mod limits;
mod profile;
mod run;
mod run_dir;
mod samples;
mod stdout;
mod train;

pub use run::run;

use cli::{Cli, Command};
use failure::Failure;

/// Carries a command line out.
///
/// # Errors
/// [`Failure`], with its exit code.
pub fn carry_out(cli: &Cli) -> Result<(), Failure> {
    match &cli.command {
        // Its configurations are many.
        Some(Command::Bench(bench)) => bench::bench(bench),
        _ => run(cli.resolve()?),
    }
}
