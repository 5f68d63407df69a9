//! Ranks of the tests, under the launchers that start them.

pub mod mpi;

use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// The bound for what is promised within ten seconds: on a busy machine it takes several times as long, but a hang
/// lasts minutes.
#[track_caller]
pub fn at_once<T>(what: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = what();
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(240), "it took {took:?}");
    result
}

pub fn ranks(mut launcher: Command, size: usize, task: &str, timeout_s: f64) -> (Output, String) {
    launcher
        .arg("-n")
        .arg(size.to_string())
        .arg(env!("CARGO_BIN_EXE_rank"))
        .arg(task)
        .arg(timeout_s.to_string());
    let output = launcher.output().expect("the launcher runs");
    let said =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    (output, said.concat())
}
