//! The resident set of a real process follows the plan.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

/// Planned peak and largest resident set of a fresh process.
fn run(folder: &Path, spec: &str) -> (f64, f64) {
    let out = folder.join(spec);
    let status = Command::new(env!("CARGO_BIN_EXE_trainer"))
        .args([
            "--config",
            "llama-15m",
            "--device",
            "cpu",
            "--steps",
            "2",
            "--quiet",
            "--recompute",
            spec,
        ])
        .args(["--micro-batch", "6", "--set", "model.vocab=4096", "--out"])
        .arg(&out)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let planned = lines[1]["planned_peak_bytes"].as_f64().unwrap();
    assert_eq!(lines[1]["peak_bytes"].as_f64().unwrap(), planned);
    (
        planned,
        lines.last().unwrap()["max_rss_bytes"].as_f64().unwrap(),
    )
}

#[test]
fn recompute_saves_what_the_plan_says() {
    let folder = tempfile::tempdir().unwrap();
    let none = run(folder.path(), "none");
    let full = run(folder.path(), "full");
    assert!(
        none.0 >= f64::from(200 << 20),
        "the rule holds from 200 MiB on: {}",
        none.0
    );
    let (planned, measured) = (none.0 - full.0, none.1 - full.1);
    assert!(
        planned > 0.2 * none.0,
        "the two sides differ: {none:?} {full:?}"
    );
    let error = (measured - planned).abs() / planned;
    assert!(
        error < 0.05,
        "planned {planned} bytes less, the resident set {measured} less: {error}"
    );
}
