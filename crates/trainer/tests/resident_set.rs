//! The resident set of a real process follows the plan.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

const MODEL: [&str; 4] = ["--config", "llama-15m", "--set", "model.vocab=4096"];

fn trainer(arguments: &[&str]) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
    command
        .args(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    assert!(command.status().unwrap().success(), "{arguments:?}");
}

/// Planned peak and largest resident set of a fresh process.
fn run(folder: &Path, name: &str, arguments: &[&str]) -> (f64, f64) {
    let out = folder.join(name);
    let settings = [
        "train",
        "--device",
        "cpu",
        "--steps",
        "2",
        "--quiet",
        "--micro-batch",
        "6",
    ];
    let out_flag = ["--out", out.to_str().unwrap()];
    trainer(&[&settings[..], &MODEL, arguments, &out_flag].concat());
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let planned = lines[1]["planned_peak_bytes"].as_f64().unwrap();
    assert_eq!(lines[1]["peak_bytes"].as_f64().unwrap(), planned);
    let resident = lines.last().unwrap()["max_rss_bytes"].as_f64().unwrap();
    (planned, resident)
}

#[test]
fn recompute_saves_what_the_plan_says() {
    let folder = tempfile::tempdir().unwrap();
    let none = run(folder.path(), "none", &["--recompute", "none"]);
    let full = run(folder.path(), "full", &["--recompute", "full"]);
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

/// States on a disk are in no memory: neither the process's own nor mapped.
#[test]
fn states_on_a_disk_are_in_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("scratch");
    let small = [
        "--recompute",
        "full",
        "--set",
        "batch.micro=1",
        "--set",
        "model.layers=16",
    ];
    let on_disk = ["--offload-optimizer", disk.to_str().unwrap()];
    let less_staging = ["--set", "offload.slab_mib=1"];
    let memory = run(folder.path(), "memory", &small);
    let flags = [&small[..], &on_disk, &less_staging].concat();
    let disk = run(folder.path(), "disk", &flags);
    let host = |name: &str| {
        let plan = std::fs::read_to_string(folder.path().join(name).join("plan.json")).unwrap();
        let plan: Value = serde_json::from_str(&plan).unwrap();
        plan["host_pinned_bytes"].as_f64().unwrap()
    };
    let planned = memory.0 - disk.0 - host("disk");
    let measured = memory.1 - disk.1;
    assert!(
        planned > 0.2 * memory.0,
        "the two sides differ: {memory:?} {disk:?}"
    );
    let error = (measured - planned).abs() / planned;
    assert!(
        error < 0.05,
        "planned {planned} bytes less, the resident set {measured} less: {error}"
    );
}

/// A model is read in pieces: the process that reads one needs no more than the one that makes its own.
#[test]
fn reading_a_model_needs_no_more_than_training() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    let model = model.to_str().unwrap();
    trainer(&[&["init", "--out", model][..], &MODEL].concat());
    let fresh = run(folder.path(), "fresh", &["--recompute", "full"]);
    let read = run(
        folder.path(),
        "read",
        &["--recompute", "full", "--init-from", model],
    );
    assert_eq!(fresh.0, read.0);
    // A fifth is what the whole model would add; what the allocator keeps differs by a few percent from run to run.
    assert!(
        read.1 < 1.05 * fresh.1,
        "resident set {} after reading, {} without",
        read.1,
        fresh.1
    );
}
