//! NCCL between processes, by libraries that stand in for it and for the driver: device memory is host memory there.

mod launchers;

use launchers::{at_once, open_mpi, ranks};
use std::process::{Command, Output, Stdio};

/// With the stand-ins; their checks of memory and streams, which are for a device's, are off.
fn by_stand_ins(mut command: Command) -> Command {
    command
        .env("LD_LIBRARY_PATH", emulation::stand_in_folder())
        .env("STAND_IN_NCCL_ANYWHERE", "1");
    command
}

/// Ranks as torchrun starts them, which meet at a place that no other test has.
fn torchrun(size: usize, task: &str, timeout_s: f64, port: u16) -> Vec<Output> {
    let start = |rank: usize| {
        let mut process = by_stand_ins(Command::new(env!("CARGO_BIN_EXE_rank")));
        process.args([task, &timeout_s.to_string()]);
        process
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", size.to_string())
            .env("LOCAL_RANK", "0");
        process
            .env("MASTER_ADDR", format!("test-{}", std::process::id()))
            .env("MASTER_PORT", port.to_string());
        process
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let started: Vec<_> = (0..size).map(start).collect();
    started
        .into_iter()
        .map(|process| process.wait_with_output().unwrap())
        .collect()
}

fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr]
        .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
        .concat()
}

#[test]
fn ranks_of_mpirun_keep_the_rules() {
    for size in [1, 2, 4] {
        let (output, said) = ranks(by_stand_ins(open_mpi()), size, "rules on a device", 60.0);
        assert!(output.status.success(), "{said}");
        assert!(
            said.contains(&format!("rank 0 of {size} by NCCL 2.32.3, Open MPI ")),
            "{said}"
        );
        assert!(!said.contains("stand-in:"), "{said}");
    }
}

#[test]
fn ranks_of_torchrun_keep_the_rules_without_mpi() {
    for (index, output) in torchrun(4, "rules on a device", 60.0, 1000)
        .iter()
        .enumerate()
    {
        let said = said(output);
        assert!(output.status.success(), "{said}");
        assert!(
            said.contains(&format!("rank {index} of 4 by NCCL 2.32.3\n")),
            "{said}"
        );
        assert!(!said.contains("stand-in:"), "{said}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_waited_for_no_longer_than_the_deadline() {
    let launcher = by_stand_ins(open_mpi());
    let (output, said) = at_once(|| ranks(launcher, 2, "late on a device", 1.0));
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(
        said.contains("rank 1 did not answer rank 0 in 1 s, in an exchange"),
        "{said}"
    );
}

#[test]
fn ranks_that_never_meet_are_told() {
    let mut process = by_stand_ins(Command::new(env!("CARGO_BIN_EXE_rank")));
    process
        .args(["rules on a device", "1"])
        .env("RANK", "0")
        .env("WORLD_SIZE", "2");
    process.env("NCCL_COMM_ID", format!("nobody-{}:1", std::process::id()));
    let output = at_once(|| process.output().unwrap());
    assert_eq!(output.status.code(), Some(7));
    let sentence = "rank 1 did not answer rank 0 in 1 s, in ncclCommInitRankConfig";
    assert!(said(&output).contains(sentence), "{}", said(&output));
}

#[test]
fn a_rank_that_ends_is_noticed_by_those_that_wait_for_it() {
    let outputs = torchrun(2, "abort on a device", 60.0, 1002);
    assert_eq!(outputs[1].status.code(), Some(3), "{}", said(&outputs[1]));
    let sentence = "failed: remote process exited or there was a network error (rank 1 has gone)";
    assert_eq!(outputs[0].status.code(), Some(7), "{}", said(&outputs[0]));
    assert!(
        said(&outputs[0]).contains(sentence),
        "{}",
        said(&outputs[0])
    );
}

#[test]
fn ranks_that_disagree_are_told_by_the_stand_in() {
    let (output, said) = ranks(by_stand_ins(open_mpi()), 2, "misfit on a device", 10.0);
    assert!(!output.status.success(), "{said}");
    assert!(
        said.contains("rank 0 sends 8 bytes where 5 are expected"),
        "{said}"
    );
}

#[test]
fn what_cannot_be_used_is_a_sentence() {
    let alone = |variables: &[(&str, &str)]| {
        let mut rank = Command::new(env!("CARGO_BIN_EXE_rank"));
        rank.env_clear()
            .env("RANK", "0")
            .env("WORLD_SIZE", "1")
            .args(["rules on a device", "10"]);
        let output = rank.envs(variables.iter().copied()).output().unwrap();
        assert_eq!(output.status.code(), Some(7), "{}", said(&output));
        said(&output)
    };
    let folder = emulation::stand_in_folder().to_str().unwrap();
    let found = ("LD_LIBRARY_PATH", folder);
    let meeting = ("NCCL_COMM_ID", "here:1");
    let missing = alone(&[("TRAINER_NCCL", "/nowhere/libnccl.so.2")]);
    assert!(
        missing.contains("NCCL does not load: /nowhere/libnccl.so.2: cannot open")
            && missing.contains("pip install nvidia-nccl-cu12"),
        "{missing}"
    );
    let other = alone(&[("TRAINER_NCCL", "libm.so.6")]);
    assert!(other.contains("libm.so.6 is no NCCL"), "{other}");
    let old = alone(&[found, ("STAND_IN_NCCL_VERSION", "21703")]);
    assert!(
        old.contains("NCCL 2.17.3; 2.18.1 or later is needed"),
        "{old}"
    );
    let nowhere = alone(&[found]);
    assert!(
        nowhere.contains("MASTER_ADDR and MASTER_PORT are not set"),
        "{nowhere}"
    );
    let no_gpu = alone(&[found, meeting, ("STAND_IN_DEVICES", "0")]);
    assert!(no_gpu.contains("failed: CUDA_ERROR_"), "{no_gpu}");
}
