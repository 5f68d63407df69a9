//! The `bench` command: strategies measured side by side, and a guard for their peaks.
//!
//! Every strategy is planned first, and then trained in its own process. Each round trains every strategy once, so a
//! machine that slows down slows all strategies alike.

mod args;
mod flags;
mod folded;
mod golden;
mod journal;
mod matrix;
mod measure;
mod output;
mod paper;
mod planning;
mod plot;
mod rows;

pub use args::BenchArgs;

use crate::failure::{Failure, Result};
use crate::gpu_watch::warnings;
use crate::interrupt::Interrupt;
use crate::stdout::{print, print_json};
use args::Shared;
use golden::Golden;
use indicatif::{ProgressBar, ProgressStyle};
use journal::{Journal, JournalEntry};
use planning::PlannedMatrix;
use rows::{Row, rows};
use serde::Serialize;
use std::ffi::OsString;
use std::fs::{self, DirEntry};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Defaults for a matrix that does not set its steps and rounds.
const WARMUP: usize = 2;
const STEPS: usize = 6;
const ROUNDS: usize = 3;

/// The form of `bench --json`. It rises with every new field, and with any change of a
/// field's name, type or meaning (`crates/trainer/schemas/`).
const SCHEMA_VERSION: u32 = 2;

/// Strategies side by side. `bench --json`.
#[derive(Serialize)]
struct BenchReport<'a> {
    /// The form of this output.
    schema_version: u32,
    /// Version of the trainer.
    version: &'static str,
    /// The device that it was measured on, or planned for.
    device: String,
    /// What it holds, if `--device-memory` says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    device_memory_bytes: Option<u64>,
    /// Steps of a run that are not counted, before the others.
    warmup: usize,
    /// Steps of a run that are counted.
    steps: usize,
    /// Runs of each strategy.
    rounds: usize,
    /// Whether nothing was run.
    plan_only: bool,
    /// A strategy each.
    rows: &'a [Row],
}

/// Compares strategies.
///
/// # Errors
/// [`Failure`]: an invalid matrix, files that cannot be read or written, peaks that changed, an interruption.
pub fn bench(args: &BenchArgs) -> Result {
    let shared = args.shared()?;
    // Read before measuring, so that a missing file is noticed at once.
    let was = args.check.as_deref().map(Golden::read).transpose()?;
    let planned = PlannedMatrix::new(&shared)?;
    planned.refuse_foreign_data(&shared)?;
    let bench = Bench::new(args, &shared);
    let (runs, interrupted) = match args.plan_only {
        true => (Vec::new(), None),
        false => bench.measure_all(&shared, &planned)?,
    };
    let rows = rows(&planned.planned, &runs, args.plan_only);
    warn_of_the_gpu(&runs);
    bench.print(&shared, args, &planned.device, &rows)?;
    if let Some(path) = &args.plot {
        plot::draw(path, &rows)?;
    }
    if let Some(signal) = interrupted {
        return Err(Failure::BenchInterrupted {
            signal,
            journal: args.journal.clone(),
        });
    }
    let golden = Golden::new(&planned.planned, &rows);
    match (&args.bless, was) {
        (Some(path), _) => golden.write(path),
        (None, Some(was)) => check(&was, &golden, args.tolerance),
        (None, None) => match output::failures(&rows) {
            0 => Ok(()),
            failed => Err(Failure::StrategiesFailed { failed }),
        },
    }
}

/// Warns of what is known to distort the measurements.
fn warn_of_the_gpu(runs: &[JournalEntry]) {
    let watched = runs
        .iter()
        .filter_map(|entry| Some((entry.strategy.as_str(), entry.run.gpu.as_ref()?)));
    for warning in warnings(&watched.collect::<Vec<_>>()) {
        tracing::warn!("{warning}");
    }
}

/// Reports differences, and fails if any byte differs.
fn check(was: &Golden, now: &Golden, tolerance: f64) -> Result {
    let changes = was.changes(now, tolerance);
    for warning in &changes.warnings {
        tracing::warn!("{warning}");
    }
    match changes.failures.as_slice() {
        [] => Ok(()),
        failures => Err(Failure::PeaksChanged(failures.join("\n"))),
    }
}

/// How a matrix is measured.
struct Bench {
    warmup: usize,
    steps: usize,
    rounds: usize,
    journal: Option<PathBuf>,
    quiet: bool,
}

impl Bench {
    fn new(args: &BenchArgs, shared: &Shared) -> Bench {
        let matrix = &shared.matrix;
        let rounds = args.rounds.map(|rounds| rounds as usize);
        Bench {
            warmup: matrix.warmup.unwrap_or(WARMUP),
            steps: matrix.steps.unwrap_or(STEPS).max(1),
            rounds: rounds.or(matrix.rounds).unwrap_or(ROUNDS).max(1),
            journal: args.journal.clone(),
            quiet: shared.options.quiet,
        }
    }

    /// Runs every possible strategy in every round. A signal ends it early, with the runs so far.
    fn measure_all(
        &self,
        shared: &Shared,
        matrix: &PlannedMatrix,
    ) -> Result<(Vec<JournalEntry>, Option<i32>)> {
        let mut journal = Journal::open(self.journal.clone(), self.asked(shared, matrix)?)?;
        let interrupt = Interrupt::new().map_err(|error| Failure::Device(error.to_string()))?;
        let folder = tempfile::tempdir().map_err(Failure::file("a temporary folder"))?;
        let bar = self.bar(matrix);
        for round in 0..self.rounds {
            for planned in &matrix.planned {
                bar.inc(1);
                let is_run = planned.obstacle.is_none() && !journal.has(&planned.strategy, round);
                let Some(decided) = planned.decided.as_ref().filter(|_| is_run) else {
                    continue;
                };
                let strategy = planned.strategy.name.clone();
                bar.set_message(strategy.clone());
                let out = folder.path().join(format!("run-{}", bar.position()));
                let run = measure::measure(decided, (self.warmup, self.steps), &out)?;
                // The signal reached the run too, so its result is dropped.
                if let Some(signal) = interrupt.signal() {
                    bar.finish_and_clear();
                    return Ok((journal.runs().to_vec(), Some(signal)));
                }
                journal.add(JournalEntry {
                    strategy,
                    round,
                    run,
                })?;
            }
        }
        bar.finish_and_clear();
        Ok((journal.runs().to_vec(), None))
    }

    /// Everything that measurements depend on, except the machine.
    fn asked(&self, shared: &Shared, matrix: &PlannedMatrix) -> Result<String> {
        let mut asked = format!(
            "{} {} {}",
            env!("CARGO_PKG_VERSION"),
            self.warmup,
            self.steps
        );
        for planned in &matrix.planned {
            asked += &format!("\n[{}]\n", planned.strategy.name);
            if let Some(decided) = &planned.decided {
                asked += &decided.config.to_toml()?;
            }
        }
        let options = &shared.options;
        for folder in [&options.init_from, &options.lora_from] {
            asked += &format!("{folder:?} {:?}\n", folder.as_deref().map(model_files));
        }
        Ok(asked)
    }

    /// A progress bar over the matrix, on a terminal.
    fn bar(&self, matrix: &PlannedMatrix) -> ProgressBar {
        if self.quiet {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::new((self.rounds * matrix.planned.len()) as u64);
        let style = ProgressStyle::with_template("{bar:12} {pos}/{len}  {msg}  {eta}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar
    }

    fn print(&self, shared: &Shared, args: &BenchArgs, device: &str, rows: &[Row]) -> Result {
        if args.form.json {
            return print_json(&BenchReport {
                schema_version: SCHEMA_VERSION,
                version: env!("CARGO_PKG_VERSION"),
                device: device.into(),
                device_memory_bytes: shared.device_bytes(),
                warmup: self.warmup,
                steps: self.steps,
                rounds: self.rounds,
                plan_only: args.plan_only,
                rows,
            });
        }
        if args.form.csv {
            return print(output::csv(rows));
        }
        let (table, reasons) = (output::table(rows), output::reasons(rows));
        if args.form.markdown {
            return print(table.markdown());
        }
        print(format_args!("{table}{reasons}"))
    }
}

/// The name, size and time of a folder's configurations and weights, which a changed model has others of.
fn model_files(folder: &Path) -> Vec<(OsString, u64, Option<SystemTime>)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let is_of_model = |entry: &DirEntry| {
        let path = entry.path();
        path.extension()
            .is_some_and(|end| end == "json" || end == "safetensors")
    };
    let files = entries.filter(is_of_model).filter_map(|entry| {
        let file = fs::metadata(entry.path()).ok()?;
        Some((entry.file_name(), file.len(), file.modified().ok()))
    });
    let mut files: Vec<_> = files.collect();
    files.sort();
    files
}
