//! How a run ended, or what probably happened if it did not record its end.

use super::run_files::RunFiles;
use super::view::Ending;
use crate::process::{Fate, OomKills, ProcessRecord};
use memory::format_bytes;
use serde::Deserialize;

/// Describes how a run ended.
pub(super) fn ending(run: &RunFiles) -> Ending {
    let ended = |mood, headline, what: &str| Ending {
        mood,
        headline,
        detail: format!("{what}. {}{}{}", reached(run), resumed(run), resident(run)),
    };
    match run.end["reason"].as_str() {
        Some("done") => ended("good", "done", "The run made all of its steps"),
        Some("interrupted") => ended("open", "interrupted", "A signal ended the run, in order"),
        Some("diverged") => ended(
            "bad",
            "diverged",
            "Loss or gradients were not finite in more steps than may be skipped, or in the last ones",
        ),
        Some("out_of_memory") => ended("bad", "out of memory", "A lease was refused"),
        Some(_) => ended(
            "bad",
            "failed",
            "An error ended the run; its standard error says which",
        ),
        None if !run.oom.is_null() && run.steps.is_empty() => ended(
            "bad",
            "out of memory",
            "The run was refused before its first step",
        ),
        None if run.begin.is_null() => ended(
            "open",
            "never began",
            "metrics.jsonl has no record of its beginning: the run was refused, or died while it was loading",
        ),
        None => without_end(run),
    }
}

/// For a `metrics.jsonl` without an `end` record.
fn without_end(run: &RunFiles) -> Ending {
    let process = ProcessRecord::deserialize(&run.begin["process"]).ok();
    let pid = process.as_ref().map_or(0, |process| process.pid);
    let (mood, headline, why) = match process.as_ref().map(ProcessRecord::fate) {
        Some(Fate::Lives { resident_bytes }) => {
            let resident = resident_bytes.map_or(String::new(), |bytes| {
                format!(", with a resident set of {}", format_bytes(bytes))
            });
            ("open", "still running", format!("Process {pid} is alive{resident}"))
        }
        Some(Fate::Gone { oom_kills }) => gone(oom_kills),
        Some(Fate::Elsewhere) => (
            "open",
            "cut off",
            "metrics.jsonl has no `end` record. The run was made on another machine, in another container, or before this \
             machine was started anew, so whether it is still running cannot be told from here; a restart would have ended \
             it"
            .into(),
        ),
        None => (
            "open",
            "cut off",
            "metrics.jsonl has no `end` record: the run is still going, or it was killed. Nothing was written that would \
             tell"
            .into(),
        ),
    };
    Ending {
        mood,
        headline,
        detail: format!("{why}. {}{}{}", reached(run), resumed(run), at_least(run)),
    }
}

fn gone(oom_kills: Option<OomKills>) -> (&'static str, &'static str, String) {
    const ELSE: &str = "a signal that cannot be caught (kill -9, a batch system's limit on time), or a defect of the trainer, \
                        of which standard error would have a message";
    match oom_kills {
        Some(OomKills { file, count }) if count > 0 => {
            let whose = match file.ends_with("vmstat") {
                true => "this machine",
                false => "its control group",
            };
            let why = format!(
                "The process is gone, killed, most likely by the kernel for want of host memory: since the run began, the \
                 kernel has killed {count} process{} of {whose} for that ({})",
                if count == 1 { "" } else { "es" },
                file.display()
            );
            ("bad", "killed, most likely for want of host memory", why)
        }
        Some(_) => {
            let why = format!(
                "The process is gone and wrote no `end` record. The kernel counts no out-of-memory kill since the run began, \
                 so the likely cause is {ELSE}"
            );
            ("bad", "killed", why)
        }
        None => {
            let why = format!(
                "The process is gone and wrote no `end` record. The kernel's counts of out-of-memory kills cannot be read \
                 here: the cause may be that, {ELSE}"
            );
            ("bad", "killed", why)
        }
    }
}

/// The last recorded step.
fn reached(run: &RunFiles) -> String {
    let of = run.config.get("train").and_then(|train| train.get("steps"));
    let of = of.map_or(String::new(), |steps| format!(" of {steps}"));
    match run.steps.last() {
        None => "No step was written down.".into(),
        Some(last) => format!("The last step written down is {}{of}.", last.step),
    }
}

fn resumed(run: &RunFiles) -> String {
    match run.resumes.as_slice() {
        [] => String::new(),
        [once] => format!(" It was resumed after step {}.", once.step),
        [.., last] => format!(
            " It was resumed {} times, the last time after step {}.",
            run.resumes.len(),
            last.step
        ),
    }
}

fn resident(run: &RunFiles) -> String {
    let resident = run.end["max_rss_bytes"].as_u64();
    resident.map_or(String::new(), |bytes| {
        format!(" The resident set was at most {}.", format_bytes(bytes))
    })
}

/// What is known of the resident set of a run that did not record it.
fn at_least(run: &RunFiles) -> String {
    let peak = run.peak_step["peak_bytes"].as_u64();
    let host = match (run.device(), peak) {
        ("cpu", Some(bytes)) => bytes,
        _ => run.peak_step["host_pinned_bytes"].as_u64().unwrap_or(0),
    };
    match host {
        0 => String::new(),
        bytes => format!(
            " Its steps held {} of host memory at least.",
            format_bytes(bytes)
        ),
    }
}
