//! The flags of `bench`, beside those of `train`.

use super::matrix::{BenchMatrix, BenchStrategy};
use crate::args::{RankArgs, RunArgs};
use crate::failure::Failure;
use clap::Args;
use memory::Rank;
use settings::load::Override;
use settings::{ConfigError, Given, Resolved, RunOptions, Task, resolve};
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
    /// Whose plans are made, of several ranks
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
    options: RunOptions,
    matrix: BenchMatrix,
    /// Training needs its device, planning none.
    task: Task,
}

impl BenchArgs {
    /// The matrix, and what its strategies share.
    ///
    /// # Errors
    /// As [`BenchMatrix::open`]; flags of `train` that say what one run writes.
    pub(crate) fn shared(&self) -> Result<Shared, Failure> {
        let output = &self.run.output;
        let written = [
            ("--out", output.out.is_some()),
            ("--save-final", output.save_final.is_some()),
            ("--dump-gradients", output.dump_gradients.is_some()),
        ];
        if let Some((flag, _)) = written.iter().find(|(_, given)| *given) {
            return Err(Failure::Usage(format!(
                "{flag} is for a single run: bench makes many, and keeps none; leave it out"
            )));
        }
        let matrix = BenchMatrix::open(&self.matrix)?;
        let mut given = self.run.given();
        given.rank = self.rank.rank();
        let resumed = given.resumed.take();
        given.config = given.config.or(resumed).or_else(|| matrix.config.clone());
        let settings = matrix.set.iter().map(|set| Override::from_set(set));
        let settings = settings.collect::<Result<Vec<_>, ConfigError>>()?;
        given.flags.splice(0..0, settings);
        Ok(Shared {
            options: self.run.options(self.form.json),
            given,
            matrix,
            task: match self.plan_only {
                true => Task::Plan,
                false => Task::Train,
            },
        })
    }
}

impl Shared {
    pub(crate) fn matrix(&self) -> &BenchMatrix {
        &self.matrix
    }

    pub(crate) fn plans_only(&self) -> bool {
        self.task == Task::Plan
    }

    pub(crate) fn options(&self) -> &RunOptions {
        &self.options
    }

    /// The configuration of a strategy, for the rank that the flags name.
    ///
    /// # Errors
    /// Settings that do not go together.
    pub(crate) fn resolve(&self, strategy: &BenchStrategy) -> Result<Resolved, ConfigError> {
        let number = self.given.rank.map_or(0, |rank| rank.number);
        self.resolve_of(strategy, number)
    }

    /// The configuration of a strategy, for the rank of a number.
    ///
    /// # Errors
    /// Settings that do not go together.
    pub(crate) fn resolve_of(
        &self,
        strategy: &BenchStrategy,
        number: usize,
    ) -> Result<Resolved, ConfigError> {
        let mut given = self.given.clone();
        given.config = strategy.config.clone().or(given.config);
        let of_strategy = strategy.ranks.map(|of| Rank { number, of });
        given.rank = of_strategy.or(given.rank.map(|rank| Rank { number, ..rank }));
        given.set.extend(strategy.set.iter().cloned());
        resolve(self.task, given, self.options.clone())
    }
}
