//! The command line, and how it becomes a configuration.

use crate::advise::AdviceArgs;
use crate::args::{RankArgs, RunArgs, SourceArgs};
use crate::bench::BenchArgs;
use crate::eval::EvalArgs;
use crate::export::ExportArgs;
use crate::foreign_flags::explained;
use crate::generate::{GenerateArgs, GenerationArgs};
use crate::pareto::ParetoArgs;
use crate::prepare::PrepareArgs;
use crate::report::ReportArgs;
use clap::{Args, Parser, Subcommand};
use memory::Rank;
use settings::load::Override;
use settings::{ConfigError, Given, Resolved, RunOptions, Task, preset, resolve};
use std::path::PathBuf;

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
    /// Time the algorithms of a run's matrix products on this GPU once, and keep the fastest
    ///
    /// Takes the flags of `train`; the products are those of a step of that run. Later runs on such a GPU, with the same cuBLASLt,
    /// take what is kept (`hardware.algorithms`). --out names another file than the one that they look for. Nothing is trained.
    #[command(after_help = preset::help())]
    Tune(Box<TuneArgs>),
    /// Write a freshly initialised model in Hugging Face layout
    #[command(after_help = preset::help())]
    Init(InitArgs),
    /// Measure strategies side by side: one table, and a guard for their peaks
    ///
    /// Takes the flags of `train`: what all strategies share.
    #[command(after_help = preset::help())]
    Bench(Box<BenchArgs>),
    /// Make token files of text, conversations or parquet, for --data
    ///
    /// Each text ends with the tokenizer's end-of-text token (of bytes: 0), each conversation as its template ends it; of
    /// conversations only the assistant's turns are learnt, of instructions and prompts only the answers. The same inputs give
    /// the same files.
    Prepare(PrepareArgs),
    /// Measure loss, perplexity and bits per byte of a model on data
    Eval(EvalArgs),
    /// Write text with a model
    Generate(GenerateArgs),
    /// Make a model in Hugging Face layout of a checkpoint
    ///
    /// With its tokenizer, chat template and every key of its config.json that training does not change. Needs no device.
    Export(ExportArgs),
    /// Tell what this machine offers for training, and what it lacks
    Doctor(DoctorArgs),
    /// Build the page of a run, or compare two
    ///
    /// Settings, curves, memory as planned and as measured, and how the run ended: one file that needs no network.
    Report(ReportArgs),
}

/// Flags of `plan`.
#[derive(Debug, Default, Args)]
pub struct PlanArgs {
    /// Print plan.json to standard output
    #[arg(long)]
    pub json: bool,
    /// What is looked for beside the plan.
    #[command(flatten)]
    pub advice: AdviceArgs,
    /// What budgets buy.
    #[command(flatten)]
    pub pareto: ParetoArgs,
    /// What generation needs.
    #[command(flatten)]
    pub generation: GenerationArgs,
    /// Whose plan is made, of several ranks.
    #[command(flatten)]
    pub rank: RankArgs,
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

/// Flags of `tune`.
#[derive(Debug, Default, Args)]
pub struct TuneArgs {
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
    /// Try although the disk seems to have no room
    #[arg(long)]
    pub force: bool,
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
    /// Measure the disk of this folder too, with a file of up to 1 GiB that is removed
    #[arg(long, value_name = "DIR")]
    pub path: Option<PathBuf>,
}

impl Cli {
    /// Reads the process's command line. One that is refused ends the process with exit code 2; a flag of another trainer is
    /// answered with the one here.
    pub fn from_command_line() -> Cli {
        Cli::try_parse().unwrap_or_else(|error| explained(error).exit())
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
            Some(Command::Plan(plan)) => {
                run(Task::Plan, &plan.run, plan.rank.rank(), plan.json)
            }
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
            Some(Command::Eval(_) | Command::Generate(_)) => Err(ConfigError::Contradiction(
                "`trainer eval` and `trainer generate` take what a model says, and have no configuration of their own".into(),
            )),
            Some(Command::Export(_)) => Err(ConfigError::Contradiction(
                "`trainer export` takes what a checkpoint says, and has no configuration of its own".into(),
            )),
            Some(Command::Doctor(doctor)) => doctor.resolve(),
            Some(Command::Report(_)) => Err(ConfigError::Contradiction(
                "`trainer report` reads the configurations of runs, and has none of its own".into(),
            )),
        }
    }
}

impl InitArgs {
    fn resolve(&self) -> Result<Resolved, ConfigError> {
        let flags = [
            ("--seed", "train.seed", &self.seed),
            ("--dtype", "train.dtype", &self.dtype),
            ("--threads", "train.threads", &self.threads),
        ];
        let mut flags = overrides(&flags);
        if self.force {
            flags.push(Override::from_switch("--force", "memory.force", true));
        }
        let given = Given {
            config: self.source.config.clone(),
            flags,
            set: self.source.set.clone(),
            ..Given::default()
        };
        let options = RunOptions {
            out: Some(self.out.clone()),
            quiet: self.quiet,
            ..RunOptions::default()
        };
        resolve(Task::Init, given, options)
    }
}

impl DoctorArgs {
    fn resolve(&self) -> Result<Resolved, ConfigError> {
        let given = Given {
            flags: overrides(&[("--threads", "train.threads", &self.threads)]),
            ..Given::default()
        };
        let options = RunOptions {
            json: self.json,
            ..RunOptions::default()
        };
        resolve(Task::Doctor, given, options)
    }
}

/// Flags with the keys that they set, where they are given.
fn overrides(flags: &[(&str, &str, &Option<String>)]) -> Vec<Override> {
    let flags = flags.iter();
    flags
        .filter_map(|(flag, key, text)| Some(Override::from_flag(flag, key, text.as_deref()?)))
        .collect()
}
