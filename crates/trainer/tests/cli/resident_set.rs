//! The resident set of a real process follows the plan.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

const MODEL: [&str; 4] = ["--config", "llama-15m", "--set", "model.vocab=4096"];

/// glibc's malloc gives freed blocks of 128 KiB back to the system at once, and all threads share one heap. By default the limit grows
/// to the largest block that was freed (32 MiB at most), and threads get heaps of their own: what malloc keeps then depends on
/// the order of threads, up to 24 MB in CI.
const MALLOC: [(&str, &str); 2] = [
    ("MALLOC_MMAP_THRESHOLD_", "131072"),
    ("MALLOC_ARENA_MAX", "1"),
];

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
    command.args(arguments).envs(MALLOC);
    command.stdout(Stdio::null());
    command
}

fn trainer(arguments: &[&str]) {
    let status = command(arguments).stderr(Stdio::null()).status();
    assert!(status.unwrap().success(), "{arguments:?}");
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
        // Weights without a tokenizer: any tokens will do here.
        &[
            "--recompute",
            "full",
            "--init-from",
            model,
            "--set",
            "data.any_tokenizer=true",
        ],
    );
    assert_eq!(fresh.0, read.0);
    // A fifth is what the whole model would add.
    assert!(
        read.1 < 1.05 * fresh.1,
        "resident set {} after reading, {} without",
        read.1,
        fresh.1
    );
}

/// Embedding and head have 32 MiB each, all else next to nothing.
const LARGE: [&str; 6] = [
    "--config",
    "tiny",
    "--set",
    "model.vocab=65536",
    "--set",
    "model.hidden=128",
];

/// Half of such a tensor: beside leases, a process that trains a small model has about as much as one that trains a large one.
const HALF_A_TENSOR: f64 = (16 << 20) as f64;

/// What a process had resident beyond the planned peak of the host.
fn beyond_the_plan(folder: &Path, name: &str, arguments: &str) -> f64 {
    let out = folder.join(name);
    let settings = "train --device cpu --quiet --micro-batch 1 --seq 32 --out";
    let settings = settings.split(' ').chain([out.to_str().unwrap()]);
    let arguments: Vec<&str> = settings.chain(arguments.split_whitespace()).collect();
    trainer(&arguments);
    let text = |name: &str| std::fs::read_to_string(out.join(name)).unwrap();
    let plan: Value = serde_json::from_str(&text("plan.json")).unwrap();
    let phases = ["load", "save", "resume", "export"];
    let planned = phases.map(|phase| plan["host_phase_bytes"][phase].as_f64().unwrap());
    let metrics = text("metrics.jsonl");
    let end: Value = serde_json::from_str(metrics.lines().last().unwrap()).unwrap();
    end["max_rss_bytes"].as_f64().unwrap() - planned.into_iter().fold(0.0, f64::max)
}

/// However large tensors are, loading and saving take what is planned: one whole tensor more would show.
#[test]
fn loading_and_saving_stay_within_the_plan_of_the_host() {
    let folder = tempfile::tempdir().unwrap();
    let beyond = |name: &str, arguments: &str| beyond_the_plan(folder.path(), name, arguments);
    let own = beyond("small", "--config tiny --steps 2");
    let large = LARGE.join(" ");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (model, saved) = (path("model"), path("saved"));
    let save = format!("{large} --steps 2 --save-every 2 --save-blocking --save-final {model}");
    // Weights without a tokenizer: any tokens will do here.
    let load = format!("--init-from {model} --steps 2 --set data.any_tokenizer=true");
    let resume = format!("--resume {saved} --steps 3 --allow-change");
    let runs = [
        ("saved", save),
        ("loaded", load),
        ("resumed", resume.clone()),
        ("converted", format!("{resume} --state-dtype 8bit")),
    ];
    for (name, arguments) in runs {
        let more = beyond(name, &arguments) - own;
        assert!(more < HALF_A_TENSOR, "{name}: {more} bytes beyond the plan");
    }
}

/// Largest resident set of a process.
#[allow(clippy::zombie_processes, reason = "wait4 waits for it")]
fn resident(arguments: &[&str]) -> u64 {
    let child = command(arguments).spawn().unwrap();
    let mut status = 0;
    // SAFETY: all zeros are a valid `rusage`, and both places outlive the call.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::wait4(child.id() as i32, &mut status, 0, &mut usage);
        usage
    };
    assert_eq!(status, 0, "{arguments:?}");
    usage.ru_maxrss as u64 * 1024
}

/// Models go from file to file in chunks, in either type, and fresh ones are written as they are drawn.
#[test]
fn models_are_made_and_exported_in_chunks() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let (small, large) = (path("small"), path("large"));
    let own = resident(&["init", "--config", "tiny", "--out", &small]);
    let made = resident(&[&["init", "--out", &large][..], &LARGE].concat());
    let copied = resident(&["export", &large, "--out", &path("copied")]);
    let rounded = resident(&[
        "export",
        &large,
        "--out",
        &path("rounded"),
        "--dtype",
        "bf16",
    ]);
    for (name, bytes) in [("init", made), ("export", copied), ("--dtype", rounded)] {
        let more = bytes.saturating_sub(own);
        assert!(
            more < 8 << 20,
            "{name}: {more} bytes more than for a small model"
        );
    }
}
