//! The commands besides training, a file or a folder each. They use the code that trains, which uses none of them.

mod bench;
mod chat;
mod check;
mod doctor;
mod eval;
mod export;
mod generate;
mod init;
mod plan;
mod prepare;
mod profile;
mod report;
mod schema;
mod show;
mod trained;
#[cfg(feature = "cuda")]
mod try_kernels;
mod tune;

use crate::args::{MeasuringArgs, RunArgs};
use crate::begin::begin;
use crate::failure::{Failure, Result};
use bench::BenchArgs;
use chat::ChatArgs;
use check::CheckArgs;
use clap::Subcommand;
use collectives::Launch;
use doctor::DoctorArgs;
use eval::EvalArgs;
use export::ExportArgs;
use generate::GenerateArgs;
use init::InitArgs;
use plan::PlanArgs;
use prepare::PrepareArgs;
use report::ReportArgs;
use schema::SchemaArgs;
use settings::{ConfigError, Resolved, preset};
use show::ShowArgs;

#[cfg(feature = "cuda")]
use {crate::kernel_trial, try_kernels::TryKernelsArgs};

pub(crate) use doctor::doctor;
#[cfg(feature = "candle")]
pub(crate) use trained::ends_in;

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
    Profile(Box<MeasuringArgs>),
    /// Time the algorithms of a run's matrix products on this GPU once, and keep the fastest
    ///
    /// Takes the flags of `train`; the products are those of a step of that run. Later runs on such a GPU, with the same cuBLASLt,
    /// take what is kept (`hardware.algorithms`). --out names another file than the one that they look for. Nothing is trained.
    #[command(after_help = preset::help())]
    Tune(Box<MeasuringArgs>),
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
    /// Talk to a model that has a chat template
    ///
    /// Each line of standard input is a turn of yours, and the answer follows; `/reset` forgets what was said, and the end of the
    /// input (Ctrl-D) ends the conversation. Keys and values of earlier turns stay, so that only new tokens are computed.
    Chat(ChatArgs),
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
    /// Compare two peaks and say what grew: exit 1 if the peak did
    ///
    /// Takes memory snapshots of PyTorch 2.1 to 2.13 (`torch.cuda.memory._dump_snapshot`), which are read without running
    /// anything in them, and our own metrics.jsonl, plan.json and memory/snapshot.pickle.
    Check(CheckArgs),
    /// Draw a memory snapshot of PyTorch as a page and a timeline
    Show(ShowArgs),
    /// Print the JSON Schema of what programs read
    ///
    /// Each such file says by its `schema_version` which version of the schema it follows.
    Schema(SchemaArgs),
    /// Try kernels that only some GPUs have, for a run that has not opened its own yet
    #[cfg(feature = "cuda")]
    #[command(name = kernel_trial::COMMAND, hide = true)]
    TryKernels(TryKernelsArgs),
}

impl Command {
    /// Carries out a command of a single process. `resolve` gives its configuration, if it has one.
    pub(crate) fn carry_out(
        &self,
        launch: Option<Launch>,
        resolve: impl FnOnce() -> Result<Resolved, ConfigError>,
    ) -> Result {
        self.refuse_several(launch)?;
        let begun = || begin(resolve()?);
        match self {
            Command::Train(_) | Command::Doctor(_) => {
                unreachable!("a launcher may start several of these: the caller carries them out")
            }
            Command::Profile(_) => profile::profile(&begun()?),
            Command::Tune(_) => tune::tune(&begun()?),
            Command::Init(_) => init::init(&begun()?),
            // Files of other trainers come before the flags are resolved.
            Command::Plan(args) => plan::plan(args),
            // `bench` resolves one configuration per strategy itself.
            Command::Bench(args) => bench::bench(args),
            Command::Prepare(args) => prepare::prepare(args),
            Command::Eval(args) => eval::eval(args),
            Command::Generate(args) => generate::generate(args),
            Command::Chat(args) => chat::chat(args),
            Command::Export(args) => export::export(args),
            Command::Report(args) => report::report(args),
            Command::Check(args) => check::check(args),
            Command::Show(args) => show::show(args),
            Command::Schema(args) => schema::schema(args),
            #[cfg(feature = "cuda")]
            Command::TryKernels(args) => try_kernels::try_kernels(args),
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Command::Train(_) => "train",
            Command::Plan(_) => "plan",
            Command::Profile(_) => "profile",
            Command::Tune(_) => "tune",
            Command::Init(_) => "init",
            Command::Bench(_) => "bench",
            Command::Prepare(_) => "prepare",
            Command::Eval(_) => "eval",
            Command::Generate(_) => "generate",
            Command::Chat(_) => "chat",
            Command::Export(_) => "export",
            Command::Doctor(_) => "doctor",
            Command::Report(_) => "report",
            Command::Check(_) => "check",
            Command::Show(_) => "show",
            Command::Schema(_) => "schema",
            #[cfg(feature = "cuda")]
            Command::TryKernels(_) => kernel_trial::COMMAND,
        }
    }

    /// Refuses a command that a launcher started several times, because each process would do all of it.
    fn refuse_several(&self, launch: Option<Launch>) -> Result {
        let instead = match self {
            Command::Plan(_) | Command::Bench(_) => " and give it --ranks N",
            _ => "",
        };
        match launch {
            Some(launch) if launch.size > 1 => Err(Failure::Usage(format!(
                "`trainer {}` runs in one process, and {} of them were started: leave out the launcher{instead}",
                self.name(),
                launch.size
            ))),
            _ => Ok(()),
        }
    }
}
