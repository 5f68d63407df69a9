//! The trainer: the command line, the training loop, run directories, and what a machine offers.
//!
//! A command line becomes [`settings::Resolved`], which [`carry_out`] does with [`planner`] and [`session`]. The binary is
//! a thin shell around it. `Trainer` (feature `candle`, on by default) is for code of one's own, which trains on tensors of candle.

mod advise;
#[cfg(feature = "cuda")]
mod algorithms;
mod args;
mod attention;
mod bench;
pub mod cli;
mod device;
mod doctor;
mod eval;
mod export;
pub mod failure;
mod foreign_flags;
mod generate;
mod gpu_watch;
mod initialise;
mod interrupt;
mod job;
mod key_flags;
mod leftovers;
#[cfg(feature = "candle")]
mod library;
mod limits;
pub mod log;
mod model_tokens;
mod pareto;
mod prepare;
mod profile;
mod prompts;
mod report;
mod run;
mod run_dir;
mod samples;
mod scatter;
mod settled;
mod stdout;
mod tracer;
mod train;
mod trained;
mod tune;

pub use failure::Failure;
pub use job::Ended;
pub use kernels::Target;
#[cfg(feature = "candle")]
pub use library::{Trainer, configuration, configuration_from_text};
pub use planner::Plan;
pub use session::StepOutcome;
pub use settings::{Config, Settings};

use cli::{Cli, Command};
use collectives::Launch;
use memory::Rank;

/// Carries a command line out.
///
/// # Errors
/// [`Ended`], with its failure.
pub fn carry_out(cli: &Cli) -> Result<(), Ended> {
    interrupt::outlive_file_size_limit()?;
    limits::allow_many_files();
    match &cli.command {
        None | Some(Command::Train(_)) => train(cli),
        Some(Command::Doctor(args)) => run::doctor(cli.resolve()?, args, launch()?.as_ref()),
        Some(command) => {
            refuse_several(command)?;
            Ok(carry_out_alone(cli, command)?)
        }
    }
}

/// Trains, as what the launcher says that this process is.
fn train(cli: &Cli) -> Result<(), Ended> {
    // One alone needs no library, and is no group unless it asks for one.
    let launch = launch()?.filter(|launch| launch.size > 1);
    let rank = launch.as_ref().map(|launch| Rank {
        number: launch.rank,
        of: launch.size,
    });
    let resolved = cli.resolve_as(rank)?;
    run::train(resolved, launch.as_ref())
}

fn launch() -> Result<Option<Launch>, Failure> {
    Ok(Launch::from_environment()?)
}

/// Refuses what a launcher started several times: each would do all of it.
fn refuse_several(command: &Command) -> Result<(), Failure> {
    let (name, instead) = match command {
        Command::Plan(_) => ("plan", "leave out the launcher and give it --ranks N"),
        Command::Bench(_) => ("bench", "leave out the launcher and give it --ranks N"),
        Command::Prepare(_) => ("prepare", "leave out the launcher"),
        Command::Report(_) => ("report", "leave out the launcher"),
        Command::Eval(_) => ("eval", "leave out the launcher"),
        Command::Export(_) => ("export", "leave out the launcher"),
        Command::Generate(_) => ("generate", "leave out the launcher"),
        Command::Profile(_) => ("profile", "leave out the launcher"),
        Command::Tune(_) => ("tune", "leave out the launcher"),
        Command::Init(_) => ("init", "leave out the launcher"),
        Command::Train(_) | Command::Doctor(_) => return Ok(()),
    };
    match launch()? {
        Some(launch) if launch.size > 1 => Err(Failure::Usage(format!(
            "`trainer {name}` runs in one process, and {} of them were started: {instead}",
            launch.size
        ))),
        _ => Ok(()),
    }
}

fn carry_out_alone(cli: &Cli, command: &Command) -> Result<(), Failure> {
    match command {
        // Its configurations are many.
        Command::Bench(bench) => bench::bench(bench),
        Command::Plan(args) => run::plan(cli.resolve()?, args),
        Command::Prepare(args) => prepare::prepare(args),
        Command::Report(args) => report::report(args),
        Command::Eval(args) => eval::eval(args),
        Command::Export(args) => export::export(args),
        Command::Generate(args) => generate::generate(args),
        Command::Profile(_) => run::profile(cli.resolve()?),
        Command::Tune(_) => run::tune(cli.resolve()?),
        Command::Init(_) => run::initialise(cli.resolve()?),
        Command::Train(_) | Command::Doctor(_) => {
            unreachable!("what a launcher may have started several of is carried out above")
        }
    }
}
