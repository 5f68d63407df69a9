//! The flags of `bench`, beside those of `train`.

use super::flags::{refuse_contradictions, refuse_of_one_run, refuse_unheeded};
use super::matrix::{BenchMatrix, BenchStrategy};
use crate::args::{RankArgs, RunArgs};
use crate::begin::complete;
use crate::commands::plan::device_memory_bytes;
use crate::failure::{Failure, Result};
use clap::Args;
use memory::Rank;
use settings::load::Override;
use settings::{Completed, ConfigError, Given, RunOptions, Size, Task, resolve};
use std::path::PathBuf;

/// Flags of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Strategies: quick, full, cpu, moe, elsewhere, h100, h200, study, or a TOML file
    #[arg(long, value_name = "NAME|FILE", default_value = "quick")]
    pub matrix: String,
    /// Plan every strategy and run none: needs no device, takes seconds
    #[arg(long)]
    pub plan_only: bool,
    /// What the device holds, in bytes or as a GPU such as h100: what needs more is oom, and --recompute auto fills it
    #[arg(long, value_name = "SIZE|NAME", allow_hyphen_values = true)]
    pub device_memory: Option<String>,
    /// Rounds over the matrix [default: the matrix's, or 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub rounds: Option<u64>,
    /// Keep measurements in FILE, and go on with those that are there
    #[arg(long = "continue", value_name = "FILE", conflicts_with = "plan_only")]
    pub journal: Option<PathBuf>,
    /// How the table is written
    #[command(flatten)]
    pub form: FormArgs,
    /// Draw peak against speed
    #[arg(long, value_name = "FILE.svg", conflicts_with = "plan_only")]
    pub plot: Option<PathBuf>,
    /// Write the peaks to FILE, for --check
    #[arg(long, value_name = "FILE", conflicts_with = "check")]
    pub bless: Option<PathBuf>,
    /// Exit 1 if a peak differs from FILE's by a byte
    #[arg(long, value_name = "FILE")]
    pub check: Option<PathBuf>,
    /// Percent by which a strategy may be slower than FILE says before --check warns
    #[arg(long, value_name = "PERCENT", default_value_t = 10.0)]
    pub tolerance: f64,
    /// Number of ranks, and the rank to plan
    #[command(flatten)]
    pub rank: RankArgs,
    /// The flags of `train`: what all strategies share
    #[command(flatten)]
    pub run: RunArgs,
}

/// How the table is written.
#[derive(Debug, Default, Args)]
#[group(multiple = false)]
pub struct FormArgs {
    /// Print everything as JSON
    #[arg(long)]
    pub json: bool,
    /// Print the table as Markdown
    #[arg(long)]
    pub markdown: bool,
    /// Print the table as comma-separated values
    #[arg(long)]
    pub csv: bool,
}

/// What all strategies share.
pub(crate) struct Shared {
    given: Given,
    pub(crate) options: RunOptions,
    pub(crate) matrix: BenchMatrix,
    pub(crate) strategies: Vec<BenchStrategy>,
    /// Training needs its device, planning none.
    task: Task,
    /// Whether the command line says what is read.
    pub(crate) names_data: bool,
    /// Whether it names the rank that is planned.
    pub(crate) names_rank: bool,
}

impl BenchArgs {
    /// The matrix, and what its strategies share.
    ///
    /// # Errors
    /// As [`BenchMatrix::open`]; flags of `train` that are not for `bench`, or contradict the matrix.
    pub(crate) fn shared(&self) -> Result<Shared> {
        refuse_of_one_run(&self.run)?;
        let device_memory = self.device_memory.as_deref().map(device_memory_bytes);
        let device_bytes = device_memory.transpose()?;
        let mut matrix = BenchMatrix::open(&self.matrix)?;
        let strategies = matrix.strategies()?;
        let mut given = Given {
            rank: self.rank.rank(),
            fills_device: true,
            device_bytes,
            ..self.run.given()
        };
        let said = given.overrides()?;
        refuse_unheeded(&said, &matrix, &strategies, self.plan_only)?;
        refuse_contradictions(&self.run, &given, &said, &strategies)?;
        let says = |key: &str| said.iter().rev().find(|flag| flag.key == key);
        let steps = says("train.steps").and_then(|flag| flag.value.as_integer());
        matrix.steps = steps.map(|steps| steps as usize).or(matrix.steps);
        let names_data = says("data.path").is_some();
        let weights = &self.run.weights;
        if given.config.is_none() && weights.init_from.is_none() && weights.lora_from.is_none() {
            given.config = matrix.config.clone();
        }
        let settings = matrix.set.iter().map(|set| Override::from_set(set));
        let settings = settings.collect::<Result<Vec<_>, ConfigError>>()?;
        given.flags.splice(0..0, settings);
        Ok(Shared {
            options: self.run.options(self.form.json),
            given,
            matrix,
            strategies,
            task: match self.plan_only {
                true => Task::Plan,
                false => Task::Train,
            },
            names_data,
            names_rank: self.rank.rank.is_some(),
        })
    }
}

impl Shared {
    pub(crate) fn plans_only(&self) -> bool {
        self.task == Task::Plan
    }

    pub(crate) fn device_bytes(&self) -> Option<u64> {
        self.given.device_bytes
    }

    /// The steps of a strategy, for the rank that the flags name, with what folders say of its model.
    ///
    /// # Errors
    /// Settings that do not go together, or folders that cannot be read.
    pub(crate) fn resolve(&self, strategy: &BenchStrategy) -> Result<Completed> {
        let mut given = self.given.clone();
        given.config = strategy.config.clone().or(given.config);
        let number = given.rank.map_or(0, |rank| rank.number);
        let of_strategy = strategy.ranks.map(|of| Rank { number, of });
        given.rank = of_strategy.or(given.rank);
        given.set.extend(strategy.set.iter().cloned());
        let completed = complete(resolve(self.task, given, self.options.clone())?)?;
        if !self.plans_only() {
            completed.config.refuse_policy_from_data()?;
        }
        match completed.config.memory.limit {
            Some(limit @ Size::Percent(_)) if self.plans_only() => Err(Failure::Usage(format!(
                "a limit of {limit} is a share of a device that --plan-only does not ask; write --memory-limit in bytes, such as \
                 60GiB, or add --device-memory SIZE|NAME"
            ))),
            _ => Ok(completed.of_steps_alone()),
        }
    }
}
