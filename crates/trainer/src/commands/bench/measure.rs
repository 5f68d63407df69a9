//! Runs a strategy once, in its own process, so that no memory and no caches carry over to the next run.

use crate::decisions::Decided;
use crate::failure::{Failure, Result};
use crate::gpu_watch::{GpuFigures, watched};
use optim::ScheduleKind;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use settings::{Config, RankEngine, Resolved, RunOptions};
use std::ffi::OsString;
use std::path::Path;
use std::process::Stdio;

/// The results of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct BenchRun {
    /// How it ended.
    pub(crate) result: Outcome,
    /// Medians and peaks over the steps that count; none if no step does.
    #[serde(flatten)]
    pub(crate) figures: Option<RunFigures>,
    /// Why there are no figures.
    pub(crate) reason: Option<String>,
    /// The state of the GPU during the run; none without NVML.
    #[serde(default)]
    pub(crate) gpu: Option<GpuFigures>,
}

/// The result of a strategy, or of one of its runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// It was measured, or it was only planned and fits.
    Ok,
    /// It does not fit.
    Oom,
    /// It failed for another reason.
    Failed,
    /// It was not run.
    Skipped,
}

impl Outcome {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Outcome::Ok => "ok",
            Outcome::Oom => "oom",
            Outcome::Failed => "failed",
            Outcome::Skipped => "skipped",
        }
    }
}

/// The figures of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunFigures {
    /// The most live bytes of the device.
    pub(crate) peak_bytes: u64,
    /// Median time of a step.
    pub(crate) step_ms: f64,
    /// Median tokens a second over steps, masked tokens included.
    pub(crate) tokens_per_s: f64,
    /// Model FLOPs in units of 10^12 a second; replays do not count.
    pub(crate) tflops: Option<f64>,
    /// Share of the device's peak; none if that is not known.
    pub(crate) mfu: Option<f64>,
    /// Loss of the last step.
    pub(crate) loss: f64,
}

/// The configuration of a run of so many steps.
pub(super) fn configuration(resolved: &Resolved, steps: usize) -> Config {
    let mut config = resolved.config.clone();
    config.train.steps = steps;
    if config.lr.schedule == ScheduleKind::Wsd {
        // This schedule decays within the run.
        config.lr.decay_steps = config.lr.decay_steps.map(|decay| decay.min(steps));
    }
    // The runs are not ranks of the launcher that may have started bench. A group of one rank is allowed.
    config.collectives.zero = config.ranks().map(|ranks| ranks.zero);
    config.collectives.engine = RankEngine::Alone;
    config
}

/// The arguments that make `train` run the configuration in a file, in a folder that does not exist yet.
pub(super) fn arguments(options: &RunOptions, file: &Path, folder: &Path) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec!["train".into(), "--quiet".into()];
    let files = [
        ("--config", Some(file)),
        ("--out", Some(folder)),
        ("--init-from", options.init_from.as_deref()),
        ("--lora-from", options.lora_from.as_deref()),
    ];
    for (flag, path) in files {
        arguments.extend(
            path.into_iter()
                .flat_map(|path| [OsString::from(flag), path.into()]),
        );
    }
    arguments
}

/// Runs `train` with a configuration for `warmup` and then `steps` more steps, in a folder that does not exist yet.
///
/// # Errors
/// If the configuration cannot be written or the program cannot be started.
pub(crate) fn measure(
    decided: &Decided,
    (warmup, steps): (usize, usize),
    folder: &Path,
) -> Result<BenchRun> {
    let config = configuration(decided, warmup + steps);
    let file = folder.with_extension("toml");
    std::fs::write(&file, config.to_toml()?).map_err(Failure::file(&file))?;
    let mut command = crate::program::again();
    command.args(arguments(&decided.options, &file, folder));
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let (ended, gpu) = watched(decided.device(), || command.output());
    let ended = ended.map_err(Failure::file("the program of a strategy"))?;
    let said = String::from_utf8_lossy(&ended.stderr);
    let reason = || {
        let error = said.lines().find_map(|line| line.strip_prefix("error: "));
        error
            .or(said.lines().last())
            .unwrap_or("it said nothing")
            .to_string()
    };
    let (result, figures, reason) = match ended.status.code() {
        Some(0) => match figures(folder, warmup) {
            Some(figures) => (Outcome::Ok, Some(figures), None),
            None => (
                Outcome::Failed,
                None,
                Some("its metrics have no steps".into()),
            ),
        },
        Some(3) => (Outcome::Oom, None, Some(reason())),
        _ => (Outcome::Failed, None, Some(reason())),
    };
    Ok(BenchRun {
        result,
        figures,
        reason,
        gpu,
    })
}

/// Reads the metrics of a run, without its first `warmup` steps.
fn figures(folder: &Path, warmup: usize) -> Option<RunFigures> {
    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).ok()?;
    let lines = text
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok());
    let steps: Vec<Value> = lines
        .filter(|line: &Value| line["kind"] == "step")
        .collect();
    let counted = steps.get(warmup..).filter(|counted| !counted.is_empty())?;
    let of = |name: &str| {
        let values = counted.iter().filter_map(|step| step[name].as_f64());
        median(values.collect())
    };
    Some(RunFigures {
        peak_bytes: steps
            .iter()
            .filter_map(|step| step["peak_bytes"].as_u64())
            .max()?,
        step_ms: of("step_ms")?,
        tokens_per_s: of("tokens_per_s")?,
        tflops: of("tflops"),
        mfu: of("mfu"),
        loss: counted.last()?["loss"].as_f64()?,
    })
}

/// The median; the mean of the two middle values if their number is even; none without values.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        count if count % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 9.0]), Some(3.0));
    }
}
