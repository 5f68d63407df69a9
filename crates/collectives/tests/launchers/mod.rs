//! The launchers that tests start ranks with.
#![allow(dead_code, reason = "not every test uses all of them")]

use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Open MPI's launcher: as root, with more ranks than cores, not bound to one.
pub fn open_mpi() -> Command {
    let version = Command::new("mpirun").arg("--version").output();
    let found =
        version.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("Open MPI"));
    assert!(
        found,
        "these tests run on Open MPI's `mpirun`: scripts/mpi installs it (apt install openmpi-bin)"
    );
    let mut mpirun = Command::new("mpirun");
    mpirun.args([
        "--allow-run-as-root",
        "--oversubscribe",
        "--bind-to",
        "none",
    ]);
    mpirun
}

/// MPICH's launcher.
pub fn mpich() -> Command {
    Command::new(mpich_home().join("bin/mpiexec"))
}

pub fn mpich_home() -> PathBuf {
    let default =
        || PathBuf::from(std::env::var_os("HOME").unwrap()).join(".cache/trainer/mpich-5.0.2");
    let home = std::env::var_os("MPICH_HOME").map_or_else(default, PathBuf::from);
    assert!(
        home.join("bin/mpiexec").exists(),
        "these tests run on MPICH 5 in {}: scripts/mpi installs it",
        home.display()
    );
    home
}

/// What is promised within ten seconds: on a machine with much other work it takes some times as long. What hangs does so for
/// minutes.
#[track_caller]
pub fn at_once<T>(what: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = what();
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(60), "it took {took:?}");
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
