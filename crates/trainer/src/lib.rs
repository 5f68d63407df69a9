//! The trainer: the command line, the training loop, run directories, and what a machine offers.
//!
//! A command line becomes [`settings::Resolved`], which [`run`] carries out with [`planner`] and [`session`]. The binary is
//! a thin shell around it.

mod advise;
mod args;
mod bench;
mod chosen;
pub mod cli;
mod device;
mod doctor;
pub mod failure;
mod gpu_watch;
mod initialise;
mod interrupt;
mod key_flags;
mod limits;
mod pareto;
mod profile;
mod report;
mod run;
mod run_dir;
mod samples;
mod scatter;
mod stdout;
mod tracer;
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
        Some(Command::Plan(args)) => run::plan(cli.resolve()?, args),
        Some(Command::Report(args)) => report::report(args),
        _ => run(cli.resolve()?),
    }
}
