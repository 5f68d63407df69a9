//! The command line, and how it becomes a configuration.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::config::args::{OutputArgs, RunArgs, SourceArgs, TrainingArgs};
use crate::config::resolve::{self, Action, Resolved, RunOptions};
use crate::config::{ConfigError, check, preset};

/// Trains transformers and knows their memory to the byte before the run starts.
///
/// Without a command it trains; without arguments, a small model on the CPU.
#[derive(Debug, Parser)]
#[command(name = "trainer", version, args_conflicts_with_subcommands = true)]
#[command(after_help = preset::help())]
pub struct Cli {
    /// What to do; nothing: train.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// The flags of `train`.
    #[command(flatten)]
    pub train: RunArgs,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a model (default command)
    #[command(after_help = preset::help())]
    Train(Box<RunArgs>),
    /// Predict the memory of a run, without its device
    ///
    /// Takes the flags of `train`, so that a command can be planned as it is; those that only say what a run writes
    /// have no effect.
    #[command(after_help = preset::help())]
    Plan(Box<PlanArgs>),
    /// Time every operation of a step, beside the least that the device could take
    ///
    /// Takes the flags of `train`; the step is that of a run, on random tokens and weights, but every operation is waited
    /// for. Nothing is written.
    #[command(after_help = preset::help())]
    Profile(Box<ProfileArgs>),
    /// Write a freshly initialised model in Hugging Face layout
    #[command(after_help = preset::help())]
    Init(InitArgs),
    /// Compare strategies
    #[command(hide = true, disable_help_flag = true)]
    Bench(Later),
    /// Make token files
    #[command(hide = true, disable_help_flag = true)]
    Prepare(Later),
    /// Measure loss and perplexity
    #[command(hide = true, disable_help_flag = true)]
    Eval(Later),
    /// Write text
    #[command(hide = true, disable_help_flag = true)]
    Generate(Later),
    /// Convert a checkpoint
    #[command(hide = true, disable_help_flag = true)]
    Export(Later),
    /// Tell what this machine offers for training, and what it lacks
    Doctor(DoctorArgs),
    /// Build the report of a run
    #[command(hide = true, disable_help_flag = true)]
    Report(Later),
}

/// Arguments of a command that is not built yet.
#[derive(Debug, Args)]
pub struct Later {
    /// Anything.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub arguments: Vec<String>,
}

/// Flags of `plan`.
#[derive(Debug, Default, Args)]
pub struct PlanArgs {
    /// Print plan.json to standard output
    #[arg(long)]
    pub json: bool,
    /// The flags of `train`.
    #[command(flatten)]
    pub run: RunArgs,
}

/// Flags of `profile`.
#[derive(Debug, Default, Args)]
pub struct ProfileArgs {
    /// Print JSON to standard output
    #[arg(long)]
    pub json: bool,
    /// The flags of `train`.
    #[command(flatten)]
    pub run: RunArgs,
}

/// Flags of `init`.
#[derive(Debug, Args)]
pub struct InitArgs {
    /// Folder for the model
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Where the configuration comes from.
    #[command(flatten)]
    pub source: SourceArgs,
    /// Seed of the initialisation
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub seed: Option<String>,
    /// Data type of the weights [default: f32]
    #[arg(long, value_name = "f32|bf16")]
    pub dtype: Option<String>,
    /// CPU threads; never changes results
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub threads: Option<String>,
    /// No progress
    #[arg(long)]
    pub quiet: bool,
}

/// Flags of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print JSON to standard output
    #[arg(long)]
    pub json: bool,
    /// CPU threads
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub threads: Option<String>,
}

impl Cli {
    /// The command, its configuration and its options.
    ///
    /// # Errors
    /// A command, flag or setting that is unknown, contradictory, out of range or not built.
    pub fn resolve(&self) -> Result<Resolved, ConfigError> {
        match &self.command {
            None => resolve_run(Action::Train, &self.train, false),
            Some(Command::Train(run)) => resolve_run(Action::Train, run, false),
            Some(Command::Plan(plan)) => resolve_run(Action::Plan, &plan.run, plan.json),
            Some(Command::Profile(profile)) => {
                resolve_run(Action::Profile, &profile.run, profile.json)
            }
            Some(Command::Init(init)) => init.resolve(),
            Some(Command::Bench(_)) => not_built("bench"),
            Some(Command::Prepare(_)) => not_built("prepare"),
            Some(Command::Eval(_)) => not_built("eval"),
            Some(Command::Generate(_)) => not_built("generate"),
            Some(Command::Export(_)) => not_built("export"),
            Some(Command::Doctor(doctor)) => doctor.resolve(),
            Some(Command::Report(_)) => not_built("report"),
        }
    }
}

impl InitArgs {
    fn resolve(&self) -> Result<Resolved, ConfigError> {
        let run = RunArgs {
            source: self.source.clone(),
            training: TrainingArgs {
                seed: self.seed.clone(),
                dtype: self.dtype.clone(),
                threads: self.threads.clone(),
                ..TrainingArgs::default()
            },
            output: OutputArgs {
                out: Some(self.out.clone()),
                quiet: self.quiet,
                ..OutputArgs::default()
            },
            ..RunArgs::default()
        };
        resolve_run(Action::Init, &run, false)
    }
}

impl DoctorArgs {
    fn resolve(&self) -> Result<Resolved, ConfigError> {
        let run = RunArgs {
            training: TrainingArgs {
                threads: self.threads.clone(),
                ..TrainingArgs::default()
            },
            ..RunArgs::default()
        };
        resolve_run(Action::Doctor, &run, self.json)
    }
}

/// Refuses a command that is not built; its name has a row in [`check`].
fn not_built(name: &'static str) -> Result<Resolved, ConfigError> {
    Err(check::command(name))
}

fn resolve_run(action: Action, run: &RunArgs, json: bool) -> Result<Resolved, ConfigError> {
    let options = RunOptions {
        out: run.output.out.clone(),
        init_from: run.training.init_from.clone(),
        save_final: run.output.save_final.clone(),
        dump_gradients: run.output.dump_gradients,
        quiet: run.output.quiet,
        json,
    };
    resolve::resolve(action, run, options)
}
