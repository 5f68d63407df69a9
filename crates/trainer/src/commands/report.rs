//! The `report` command: writes a page about a run, or about two.

use crate::failure::{Failure, Result};
use crate::stdout::print;
use clap::Args;
use memory::Rank;
use planner::Plan;
use report::page;
use serde_json::Value;
use settings::load::{Source, load};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The folder of runs without `--out`.
const RUNS: &str = "runs";

/// Flags of `report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Run directories: one to report on, or two to compare [default: the newest under runs/]
    #[arg(value_name = "DIR", num_args = 0..=2)]
    pub runs: Vec<PathBuf>,
    /// Print how it ended and its memory in tables, and write nothing
    #[arg(long)]
    pub text: bool,
    /// Write the page to FILE [default: report.html in the run directory, or report-vs-A.html in the second]
    #[arg(long, value_name = "FILE", conflicts_with = "text")]
    pub out: Option<PathBuf>,
}

/// Writes a page and prints its path, or prints tables.
///
/// # Errors
/// [`Failure`]: no run to report on, files that cannot be read or written.
pub(crate) fn report(args: &ReportArgs) -> Result {
    let newest;
    let runs = match args.runs.as_slice() {
        [] => {
            newest = [newest_run(Path::new(RUNS))?];
            &newest
        }
        runs => runs,
    };
    if args.text {
        return print(match runs {
            [a, b] => page::text_of_comparison(a, b)?,
            _ => page::text(&runs[0])?,
        });
    }
    let out = args.out.as_deref();
    let written = match runs {
        [a, b] => page::write_comparison(a, b, out)?,
        _ => page::write(&runs[0], out, others)?,
    };
    print(format_args!("{}\n", written.display()))
}

/// What the run would need with other settings, as `trainer plan` prints it. None, with a warning, if the run's
/// configuration cannot be planned here.
fn others(config: &str, plan: &Value) -> Option<Value> {
    let planned = plan_others(config, plan).inspect_err(|reason| {
        tracing::warn!("the page does not say what other settings would need: {reason:#}");
    });
    planned.ok()
}

fn plan_others(config: &str, plan: &Value) -> Result<Value> {
    let source = Source::parse(String::new(), "config.toml".into(), config)?;
    let mut config = load(&source, &[], false)?.config;
    if let (Some(number), Some(of)) = (plan["rank"].as_u64(), plan["ranks"].as_u64()) {
        let [number, of] = [number, of].map(|count| count as usize);
        config.join(Rank { number, of })?;
    }
    let plan = Plan::with_alternatives(&config, config.device().target())?;
    Ok(serde_json::to_value(plan).expect("a plan is plain data"))
}

/// The run that wrote its metrics last. Names do not tell, because they begin with the model's name, and writing a page
/// again does not make a run newer.
fn newest_run(runs: &Path) -> Result<PathBuf> {
    let written = |folder: &PathBuf| -> Option<SystemTime> {
        let metrics = folder.join("metrics.jsonl").metadata();
        let file = metrics.or_else(|_| folder.join("plan.json").metadata());
        file.ok()?.modified().ok()
    };
    let folders = std::fs::read_dir(runs).into_iter().flatten().flatten();
    let dated = folders.filter_map(|entry| Some((written(&entry.path())?, entry.path())));
    dated.max().map(|(_, folder)| folder).ok_or_else(|| {
        Failure::Usage(format!(
            "there is no run under {}/ to report on; name a run directory: `trainer report DIR`",
            runs.display()
        ))
    })
}
