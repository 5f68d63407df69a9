//! What goes where: data to stdout, logs and progress to stderr, no colour unless on a terminal.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use std::process::Stdio;

#[test]
fn progress_goes_to_stderr_and_the_summary_to_stdout() {
    let place = Workplace::new();
    let outcome = place
        .trainer("--config small.toml --steps 25 --out run")
        .succeeds();
    let lines: Vec<&str> = outcome
        .stderr
        .lines()
        .filter(|line| line.starts_with("step "))
        .collect();
    assert_eq!(lines.len(), 4, "steps 1, 10, 20 and 25: {outcome:?}");
    for part in ["25/25", "loss ", "tok/s", "peak ", "(plan "] {
        assert!(lines[3].contains(part), "{part}: {outcome:?}");
    }
    assert!(!outcome.stdout.contains("tok/s"), "{outcome:?}");
    assert!(!outcome.stderr.contains("run directory"), "{outcome:?}");
    let quiet = place
        .trainer("--config small.toml --steps 25 --quiet --out quiet")
        .succeeds();
    let mut lines = quiet.stderr.lines();
    assert!(!lines.any(|line| line.starts_with("step ")), "{quiet:?}");
    assert!(quiet.stdout.contains("run directory quiet"), "{quiet:?}");
}

#[test]
fn there_are_no_escape_codes() {
    let place = Workplace::new();
    let commands = [
        "--config small.toml --steps 2",
        "--config small.toml --memory-limit 1000",
        "plan",
        "--help",
        "--frobnicate",
        "--config nowhere",
    ];
    for arguments in commands {
        for no_color in [false, true] {
            let mut command = place.command(arguments);
            command.env("RUST_LOG", "debug");
            if no_color {
                command.env("NO_COLOR", "1");
            }
            let output = command.output().unwrap();
            assert!(!output.stderr.is_empty() || !output.stdout.is_empty());
            let escape = output
                .stderr
                .iter()
                .chain(&output.stdout)
                .find(|byte| **byte == 0x1b);
            assert_eq!(escape, None, "{arguments}: {output:?}");
        }
    }
}

#[test]
fn logs_are_asked_for_with_rust_log() {
    let place = Workplace::new();
    let stderr = |level: &str| {
        let mut command = place.command("--config small.toml --steps 1 --quiet");
        let output = command.env("RUST_LOG", level).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    assert_eq!(stderr("error"), "");
    assert!(stderr("info").contains("training on (built-in text)"));
    assert!(stderr("debug").len() > stderr("info").len());
}

#[test]
fn help_and_version_are_data() {
    let place = Workplace::new();
    let help = place.trainer("--help").succeeds();
    for part in ["train", "plan", "init", "--recompute", "llama-3-8b"] {
        assert!(help.stdout.contains(part), "{part}");
    }
    assert_eq!(help.stderr, "");
    let short = place.trainer("-V").succeeds();
    let version = concat!("trainer ", env!("CARGO_PKG_VERSION"));
    assert_eq!(short.stdout, format!("{version}\n"));
    let long = place.trainer("--version").succeeds().stdout;
    assert!(long.starts_with(&format!("{version} (commit ")), "{long}");
    let features = long.lines().nth(1).unwrap();
    assert!(features.starts_with("features: candle, "), "{long}");
    let has_cuda = features.contains(", cuda, ");
    assert_eq!(has_cuda, cfg!(feature = "cuda"), "{long}");
}

/// `trainer plan | head -1`: the reader has what it wanted.
#[test]
fn a_reader_of_stdout_may_leave() {
    let place = Workplace::new();
    for arguments in [
        "plan --config llama-3.1-405b --json",
        "plan",
        "--config small.toml --steps 1",
    ] {
        let mut command = place.command(arguments);
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{arguments}: {stderr}");
        assert!(!stderr.contains("panicked"), "{arguments}: {stderr}");
    }
}

/// `trainer 2>&1 | head`: a run goes on without its audience.
#[test]
fn a_reader_of_progress_may_leave() {
    let place = Workplace::new();
    let mut command = place.command("--config small.toml --set log.every=1 --out run");
    let mut child = command
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stderr.take());
    assert!(child.wait().unwrap().success());
    let metrics = Metrics::read(&place, "run");
    assert_eq!((metrics.steps().len(), metrics.end_reason()), (4, "done"));
}

/// A disk that is full is no success.
#[test]
fn a_plan_that_cannot_be_written_fails() {
    let full = std::fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let place = Workplace::new();
    let mut command = place.command("plan --json");
    let output = command.stdout(full).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(4), "{stderr}");
    assert!(
        stderr.contains("error: cannot write standard output: No space left"),
        "{stderr}"
    );
}
