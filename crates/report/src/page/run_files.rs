//! A run directory, read as far as it is there.

use super::error::PageError;
use super::records::{EvaluationSummary, SAMPLES, Sample, harmless};
use serde_json::Value;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

/// What a run wrote. What is missing is null or empty.
pub(super) struct RunFiles {
    /// As it was named.
    pub(super) folder: PathBuf,
    /// `config.toml`, as it stands.
    pub(super) config_text: String,
    /// The same, read.
    pub(super) config: toml::Table,
    /// `plan.json`.
    pub(super) plan: Value,
    /// The record `run`.
    pub(super) begin: Value,
    /// What curves need of the steps.
    pub(super) steps: Vec<Step>,
    /// The record of the step with the largest peak.
    pub(super) peak_step: Value,
    /// The record of the last step.
    pub(super) last_step: Value,
    /// All evaluations, in short.
    pub(super) evaluations: Vec<EvaluationSummary>,
    /// The record of the evaluation with the largest peak.
    pub(super) peak_evaluation: Value,
    /// The last texts of the model's own.
    pub(super) samples: VecDeque<Sample>,
    /// Where it was resumed.
    pub(super) resumes: Vec<ResumePoint>,
    /// How long all steps but the first took, and for how much of it they waited for data.
    time_ms: (f64, f64),
    /// The record `end`, where it is the last.
    pub(super) end: Value,
    /// `oom.json`.
    pub(super) oom: Value,
    /// `memory/timeline.svg`.
    pub(super) timeline: Option<String>,
}

/// A step, in short: runs may have a million.
pub(super) struct Step {
    pub(super) step: u64,
    /// None where it was not finite.
    pub(super) loss: Option<f64>,
    pub(super) tokens_per_s: Option<f64>,
    /// The choices of the most chosen expert over their mean, in the layer where that is largest.
    pub(super) expert_load: Option<f64>,
    /// The peak less the plan's.
    pub(super) beyond_plan: i64,
}

/// Where a run goes on.
pub(super) struct ResumePoint {
    pub(super) step: u64,
    pub(super) from: String,
    pub(super) changes: Vec<String>,
}

impl RunFiles {
    /// Reads a run directory.
    pub(super) fn read(folder: &Path) -> Result<RunFiles, PageError> {
        let file = |name: &str| text(&folder.join(name));
        let (config, plan) = (file("config.toml")?, file("plan.json")?);
        let metrics = folder.join("metrics.jsonl");
        if config.is_none() && plan.is_none() && !metrics.is_file() {
            return Err(PageError::NoRun(folder.into()));
        }
        let config_text = config.unwrap_or_default();
        let mut run = RunFiles {
            folder: folder.into(),
            config: config_text
                .parse()
                .map_err(malformed(&folder.join("config.toml")))?,
            config_text,
            plan: json(&folder.join("plan.json"), plan)?,
            begin: Value::Null,
            steps: Vec::new(),
            peak_step: Value::Null,
            last_step: Value::Null,
            evaluations: Vec::new(),
            peak_evaluation: Value::Null,
            samples: VecDeque::new(),
            resumes: Vec::new(),
            time_ms: (0.0, 0.0),
            end: Value::Null,
            oom: json(&folder.join("oom.json"), file("oom.json")?)?,
            timeline: file("memory/timeline.svg")?,
        };
        if metrics.is_file() {
            run.read_metrics(&metrics)?;
        }
        Ok(run)
    }

    /// The last line may have been cut short: whoever wrote it was killed.
    fn read_metrics(&mut self, path: &Path) -> Result<(), PageError> {
        let unreadable = |source| PageError::Read {
            path: path.into(),
            source,
        };
        let mut lines = BufReader::new(File::open(path).map_err(unreadable)?)
            .split(b'\n')
            .peekable();
        while let Some(line) = lines.next() {
            match serde_json::from_slice(&line.map_err(unreadable)?) {
                Ok(record) => self.take(record),
                Err(_) if lines.peek().is_none() => {}
                Err(error) => return Err(malformed(path)(error)),
            }
        }
        Ok(())
    }

    fn take(&mut self, record: Value) {
        let kind = record["kind"].as_str().unwrap_or_default();
        if kind == "end" {
            self.end = record;
            return;
        }
        // A run that was resumed goes on beyond an end.
        self.end = Value::Null;
        match kind {
            "run" => self.begin = record,
            "step" => self.take_step(record),
            // Whoever went on with a run is the one that may be at work, or have been killed.
            "resume" => {
                self.resumes.push(resume(&record));
                self.begin["process"] = record["process"].clone();
            }
            "eval" => {
                self.evaluations.push(EvaluationSummary::read(&record));
                keep_larger(&mut self.peak_evaluation, &record);
            }
            "sample" => {
                self.samples.push_back(Sample::read(&record));
                if self.samples.len() > SAMPLES {
                    self.samples.pop_front();
                }
            }
            _ => {}
        }
    }

    fn take_step(&mut self, record: Value) {
        let bytes = |name: &str| record[name].as_u64();
        let peak = bytes("peak_bytes").unwrap_or(0);
        let planned = bytes("planned_peak_bytes").unwrap_or(peak);
        self.steps.push(Step {
            step: bytes("step").unwrap_or(0),
            loss: record["loss"].as_f64(),
            tokens_per_s: record["tokens_per_s"].as_f64(),
            expert_load: largest(&record["expert_load_max_over_mean"]),
            beyond_plan: peak as i64 - planned as i64,
        });
        let ms = |name: &str| record[name].as_f64().unwrap_or(0.0);
        // Nothing can have been read ahead of the first step.
        if !self.last_step.is_null() {
            self.time_ms.0 += ms("step_ms");
            self.time_ms.1 += ms("data_wait_ms");
        }
        keep_larger(&mut self.peak_step, &record);
        self.last_step = record;
    }

    /// The folder's own name.
    pub(super) fn name(&self) -> String {
        let whole = self.folder.canonicalize();
        let whole = whole.as_ref().unwrap_or(&self.folder);
        let name = whole.file_name().unwrap_or(whole.as_os_str());
        name.to_string_lossy().into_owned()
    }

    /// `cpu` or `cuda:N`.
    pub(super) fn device(&self) -> &str {
        let device = self.begin["device"].as_str();
        device.or(self.plan["device"].as_str()).unwrap_or("unknown")
    }

    /// The loss of the last step that had one.
    pub(super) fn last_loss(&self) -> Option<f64> {
        self.steps.iter().rev().find_map(|step| step.loss)
    }

    /// The evaluation with the lowest loss, the first of them.
    pub(super) fn best_evaluation(&self) -> Option<&EvaluationSummary> {
        let finite = self.evaluations.iter();
        let finite = finite.filter_map(|evaluation| Some((evaluation.loss?, evaluation)));
        let best = finite.min_by(|(a, _), (b, _)| a.total_cmp(b));
        best.map(|(_, evaluation)| evaluation)
    }

    /// Percent of their time that steps waited for data, where it is more than one.
    pub(super) fn waited_percent(&self) -> Option<f64> {
        let percent = 100.0 * self.time_ms.1 / self.time_ms.0;
        (percent.is_finite() && percent > 1.0).then_some(percent)
    }

    /// The median, without the first two steps where there are more: they warm up.
    pub(super) fn tokens_per_s(&self) -> Option<f64> {
        let warm = if self.steps.len() > 4 { 2 } else { 0 };
        let steps = self.steps.iter().skip(warm);
        let mut speeds: Vec<f64> = steps.filter_map(|step| step.tokens_per_s).collect();
        speeds.sort_by(f64::total_cmp);
        speeds.get(speeds.len() / 2).copied()
    }
}

/// Keeps the record with the larger peak, the first of equal ones.
fn keep_larger(kept: &mut Value, record: &Value) {
    let peak = |record: &Value| record["peak_bytes"].as_u64().unwrap_or(0);
    if kept.is_null() || peak(record) > peak(kept) {
        *kept = record.clone();
    }
}

fn resume(record: &Value) -> ResumePoint {
    let text = |value: &Value| harmless(value.as_str().unwrap_or_default());
    ResumePoint {
        step: record["step"].as_u64().unwrap_or(0),
        from: text(&record["from"]),
        changes: record["changes"]
            .as_array()
            .into_iter()
            .flatten()
            .map(text)
            .collect(),
    }
}

/// A file's text; none where there is no such file.
fn text(path: &Path) -> Result<Option<String>, PageError> {
    match files::read_regular(path) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => Ok(None),
        Err(source) => Err(PageError::Read {
            path: path.into(),
            source,
        }),
    }
}

fn json(path: &Path, text: Option<String>) -> Result<Value, PageError> {
    let Some(text) = text else {
        return Ok(Value::Null);
    };
    serde_json::from_str(&text).map_err(malformed(path))
}

fn malformed<E: std::fmt::Display>(path: &Path) -> impl FnOnce(E) -> PageError {
    move |error| PageError::Malformed {
        path: path.into(),
        reason: error.to_string().trim().replace('\n', " "),
    }
}
/// The largest number of a list; none if it has none.
fn largest(list: &Value) -> Option<f64> {
    let numbers = list.as_array()?.iter().filter_map(Value::as_f64);
    numbers.reduce(f64::max)
}
