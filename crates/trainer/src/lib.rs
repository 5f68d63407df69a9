//! The trainer: the command line, the training loop, run directories, and what a machine offers.
//!
//! A command line becomes [`settings::Resolved`], which [`run`] carries out with [`planner`] and [`session`]. The binary is
//! a thin shell around it. [`Trainer`] is for code of one's own, which trains on tensors of candle.

mod advise;
mod args;
mod bench;
mod chosen;
pub mod cli;
mod device;
mod doctor;
mod eval;
mod export;
pub mod failure;
mod generate;
mod gpu_watch;
mod initialise;
mod interrupt;
mod key_flags;
mod library;
mod limits;
mod pareto;
mod prepare;
mod profile;
mod report;
mod run;
mod run_dir;
mod samples;
mod scatter;
mod stdout;
mod tracer;
mod train;
mod trained;

pub use failure::Failure;
pub use kernels::Target;
pub use library::{Trainer, configuration, configuration_from_text};
pub use planner::Plan;
pub use run::run;
pub use session::StepOutcome;
pub use settings::{Config, Settings};

use cli::{Cli, Command};

/// Carries a command line out.
///
/// # Errors
/// [`Failure`], with its exit code.
pub fn carry_out(cli: &Cli) -> Result<(), Failure> {
    interrupt::outlive_file_size_limit()?;
    match &cli.command {
        // Its configurations are many.
        Some(Command::Bench(bench)) => bench::bench(bench),
        Some(Command::Plan(args)) => run::plan(cli.resolve()?, args),
        Some(Command::Doctor(args)) => run::doctor(cli.resolve()?, args),
        Some(Command::Prepare(args)) => prepare::prepare(args),
        Some(Command::Report(args)) => report::report(args),
        Some(Command::Eval(args)) => eval::eval(args),
        Some(Command::Export(args)) => export::export(args),
        Some(Command::Generate(args)) => generate::generate(args),
        _ => run(cli.resolve()?),
    }
}
