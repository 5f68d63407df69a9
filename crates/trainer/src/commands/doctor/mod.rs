//! The `doctor` command: what this machine offers for training, and what is missing.

mod copies;
mod disk;
mod gpus;
mod host;
mod overhead;
mod ranks;
mod rates;

pub(crate) use rates::{DeviceRates, RateWork};

use crate::args::overrides;
use crate::failure::Result;
use crate::job::{FailedCommand, together};
use crate::stdout::{print, print_json};
use crate::threads::start_threads;
use clap::Args;
use collectives::Launch;
use memory::format_bytes;
use report::Table;
use serde::Serialize;
use settings::load::{Source, load};
use settings::{ConfigError, preset};
use std::num::NonZeroUsize;
use std::path::PathBuf;

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
    /// Under a launcher: ranks that share each sequence, so that the slowest rank is named by its place
    #[arg(long, visible_alias = "cp", value_name = "N")]
    pub context_parallel_size: Option<NonZeroUsize>,
    /// Under a launcher: stages of a pipeline, for the same
    #[arg(long, visible_alias = "pp", value_name = "N")]
    pub pipeline_model_parallel_size: Option<NonZeroUsize>,
}

/// What this machine offers: the output of `doctor --json`.
#[derive(Clone, Debug, Serialize)]
struct Diagnosis {
    /// Version of the trainer.
    version: &'static str,
    /// The processor and its memory.
    host: host::Host,
    /// The disk of `--path`; null without it.
    disk: Option<disk::DiskRates>,
    /// The ranks that a launcher started; null without one.
    ranks: Option<ranks::RankLinks>,
    /// Whether this binary can use GPUs.
    cuda_built: bool,
    /// The kinds of code that it has for every kernel, read from the code itself: `sm_90` is machine code, `compute_80
    /// ptx 8.8` is compiled by the driver of another GPU. Empty if it was built without CUDA.
    carries: Vec<String>,
    /// GPUs that can be used.
    gpus: Vec<gpus::FoundGpu>,
    /// What is missing, and what to do.
    missing: Vec<String>,
}

/// Examines and measures the machine, within seconds. Also measures the disk of `--path`, and the links between ranks
/// that a launcher started.
pub(crate) fn doctor(args: &DoctorArgs, launch: Option<&Launch>) -> Result<(), FailedCommand> {
    let flags = overrides(&[("--threads", "train.threads", &args.threads)]);
    let loaded = load(&Source::open(preset::DEFAULT)?, &flags, false)?;
    start_threads(loaded.config.train.threads)?;
    let Some(launch) = launch else {
        return Ok(diagnose(args, None)?);
    };
    let size = |given: Option<NonZeroUsize>| given.map_or(1, NonZeroUsize::get);
    let (context, stages) = (
        size(args.context_parallel_size),
        size(args.pipeline_model_parallel_size),
    );
    if !launch.size.is_multiple_of(context.saturating_mul(stages)) {
        return Err(ConfigError::Contradiction(format!(
            "{} ranks do not divide into {stages} stages of groups of {context}; take other --cp and --pp, or start other ranks",
            launch.size
        ))
        .into());
    }
    // No model is trained, so the grid is not checked against one.
    let mut config = loaded.config;
    (config.parallel.context, config.parallel.pipeline) = (context, stages);
    let (job, ranks) = ranks::RankLinks::measure(&config, launch)?;
    together(job, |job| {
        // Only one rank examines the machine while the others wait, so that they do not disturb it.
        let told = match job.leads() {
            true => diagnose(args, Some(ranks)),
            false => Ok(()),
        };
        job.agree(told)
    })
}

fn diagnose(args: &DoctorArgs, ranks: Option<ranks::RankLinks>) -> Result {
    let (gpus, missing) = gpus::gpus();
    let diagnosis = Diagnosis {
        version: env!("CARGO_PKG_VERSION"),
        host: host::Host::new()?,
        disk: args
            .path
            .as_deref()
            .map(disk::DiskRates::measure)
            .transpose()?,
        ranks,
        cuda_built: cfg!(feature = "cuda"),
        #[cfg(feature = "cuda")]
        carries: kernels::cuda::carried(),
        #[cfg(not(feature = "cuda"))]
        carries: Vec::new(),
        gpus,
        missing,
    };
    if args.json {
        return print_json(&diagnosis);
    }
    print(format_args!("{diagnosis}"))
}

impl std::fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.host.table())?;
        if let Some(disk) = &self.disk {
            write!(f, "\n{}", disk.table())?;
        }
        for gpu in &self.gpus {
            write!(f, "\n{}", gpu.table())?;
        }
        if let Some(ranks) = &self.ranks {
            write!(f, "\n{}", ranks.table())?;
        }
        if !self.carries.is_empty() {
            writeln!(f, "\nkernels in this binary: {}", self.carries.join(", "))?;
        }
        if !self.missing.is_empty() {
            writeln!(f)?;
        }
        for missing in &self.missing {
            writeln!(f, "missing: {missing}")?;
        }
        Ok(())
    }
}

/// Rows of names and values, without those that have no value.
fn rows(title: &str, rows: Vec<(&str, Option<String>)>) -> Table {
    let mut table = Table::new(&[title, ""], &[]);
    for (name, value) in rows {
        if let Some(value) = value {
            table.row([name.to_string(), value]);
        }
    }
    table
}

/// Bytes for people; none if there is no figure.
fn bytes(bytes: Option<u64>) -> Option<String> {
    bytes.map(format_bytes)
}
