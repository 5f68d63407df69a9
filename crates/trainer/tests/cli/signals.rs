//! Ctrl-C and `kill`: the run saves its state, ends cleanly, and goes on from there.

use crate::metrics::Metrics;
use crate::workplace::{Workplace, signal, until, until_end};
use std::process::Stdio;

fn ends_a_run(name: &str, code: i32) {
    let place = Workplace::new();
    let mut child = place
        .command("--config small.toml --steps 100000000 --save-final model --out run --quiet")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let is_training = || {
        let text = std::fs::read_to_string(place.path("run/metrics.jsonl")).unwrap_or_default();
        text.contains(r#""kind":"step""#)
    };
    until(&mut child, is_training);
    signal(&child, name);
    until_end(&mut child);
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{name}: {stderr}");

    let metrics = Metrics::read(&place, "run");
    assert_eq!(metrics.end_reason(), "interrupted");
    let made = metrics.steps().len();
    assert!(made > 0);
    assert_eq!(metrics.0.last().unwrap()["steps"], made);
    let message = format!(
        "error: interrupted after step {made}, whose state is in run/checkpoints/step-{made}"
    );
    assert!(stderr.contains(&message), "{stderr}");
    assert!(
        stderr.contains("hint: the same command with --resume latest"),
        "{stderr}"
    );
    assert_eq!(output.stdout, b"", "a run that did not end has no summary");
    assert!(!place.path("model/model.safetensors").exists());
}

/// A first step of many micro-batches is broken off, and made again from its beginning. The signal may come before it
/// begins: `crates/session/tests/stop.rs` breaks off at every place of a step.
#[test]
fn in_the_middle_of_a_step() {
    let place = Workplace::new();
    let run = "--config small.toml --set lr.schedule=constant --accum 3000 --steps 1 --quiet";
    let mut child = place
        .command(&format!("{run} --out run"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let text = || std::fs::read_to_string(place.path("run/metrics.jsonl")).unwrap_or_default();
    until(&mut child, || text().contains(r#""kind":"run""#));
    signal(&child, "TERM");
    until_end(&mut child);
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(place.path("run/checkpoints/step-0/manifest.json").exists());
    place
        .trainer("--resume latest --out run --quiet")
        .succeeds();
    place.trainer(&format!("{run} --out whole")).succeeds();
    let [run, whole] = ["run", "whole"].map(|run| Metrics::read(&place, run).untimed_steps());
    assert_eq!(run, whole);
}

#[test]
fn an_interrupt() {
    ends_a_run("INT", 130);
}

#[test]
fn a_request_to_end() {
    ends_a_run("TERM", 143);
}
