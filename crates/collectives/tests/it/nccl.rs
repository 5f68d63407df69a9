//! NCCL between processes, by libraries that stand in for it and for the driver: device memory is host memory there.

use crate::launchers::mpi::open_mpi;
use crate::launchers::{at_once, ranks};
use crate::rules::IN_PLACE;
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

/// With the stand-ins; their checks that memory and streams are a device's are off.
fn by_stand_ins(mut command: Command) -> Command {
    command
        .env("LD_LIBRARY_PATH", emulation::stand_in_folder())
        .env("STAND_IN_NCCL_ANYWHERE", "1");
    command
}

/// A port of this machine that is free just now.
fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    listener.local_addr().unwrap().port()
}

/// Ranks as torchrun starts them, which meet on the port after that of torchrun's own agent.
fn torchrun(
    size: usize,
    task: &str,
    timeout_s: f64,
    set: impl Fn(&mut Command, usize),
) -> Vec<Output> {
    let port = free_port() - 1;
    let start = |rank: usize| {
        let mut process = by_stand_ins(Command::new(env!("CARGO_BIN_EXE_rank")));
        set(&mut process, rank);
        process.args([task, &timeout_s.to_string()]);
        process
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", size.to_string())
            .env("LOCAL_RANK", "0");
        process
            .env("MASTER_ADDR", "127.0.0.1")
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
    for (index, output) in torchrun(4, "rules on a device", 60.0, |_, _| {})
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

/// NCCL's buffers exist once a group has started, and none are made later, when there might be no memory for them. One
/// rank's are larger than the other's, and both report the larger figure.
#[test]
fn what_nccl_takes_is_taken_at_the_start_and_known() {
    const CHANNEL: u64 = 1 << 20;
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, rank: usize| folder.path().join(format!("{name}-{rank}"));
    let outputs = torchrun(2, "rules on a device", 60.0, |rank_process, rank| {
        rank_process
            .env("STAND_IN_FIRST_USES", file("first-uses", rank))
            .env("STAND_IN_EXCHANGES", file("exchanges", rank))
            .env("STAND_IN_NCCL_CHANNEL_BYTES", (CHANNEL << rank).to_string());
    });
    // Channels to the one peer and along the ring, on the rank with the larger ones.
    let held = 2 * u64::from(collectives::NCCL_CHANNELS) * (CHANNEL << 1);
    for (rank, output) in outputs.iter().enumerate() {
        let said = said(output);
        assert!(output.status.success(), "{said}");
        assert!(
            said.contains(&format!("holding {held} bytes of a GPU\n")),
            "{said}"
        );
        let lines = |name| std::fs::read_to_string(file(name, rank)).unwrap();
        assert_eq!(lines("first-uses").lines().count(), 2);
        // The rehearsal makes two of each. Pieces that are in their place are gathered by the library, not sent to each
        // rank.
        let exchanges = lines("exchanges");
        let rehearsed: Vec<&str> = exchanges.lines().take(4).collect();
        let many = 16 << 20;
        let expected = ["exchange 4096", "gathering 4096"].map(String::from);
        let expected = [
            expected,
            [format!("exchange {many}"), format!("gathering {many}")],
        ]
        .concat();
        assert_eq!(rehearsed, expected);
        let in_place = format!("gathering {}", 2 * IN_PLACE);
        assert!(
            exchanges.lines().any(|line| line == in_place),
            "{exchanges}"
        );
    }
}

#[test]
fn a_rank_that_does_not_come_is_waited_for_no_longer_than_the_deadline() {
    let launcher = by_stand_ins(open_mpi());
    let (output, said) = at_once(|| ranks(launcher, 2, "late on a device", 5.0));
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(
        said.contains("rank 1 did not answer rank 0 in 5 s, in an exchange"),
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
    process.env("NCCL_COMM_ID", format!("127.0.0.1:{}", free_port()));
    let output = at_once(|| process.output().unwrap());
    assert_eq!(output.status.code(), Some(7));
    let sentence = "rank 1 did not answer rank 0 in 1 s, in the meeting of ranks";
    assert!(said(&output).contains(sentence), "{}", said(&output));
}

#[test]
fn a_rank_that_ends_is_noticed_by_those_that_wait_for_it() {
    let outputs = torchrun(2, "abort on a device", 60.0, |_, _| {});
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
