//! MPI between processes: Open MPI, and MPICH 5 by the standard's interface and by its own.

use crate::launchers::mpi::{mpich, mpich_home, open_mpi, open_mpi_library};
use crate::launchers::{at_once, ranks};
use std::process::Command;

#[track_caller]
fn keeps_the_rules(launcher: Command, size: usize, engine: &str) {
    let (output, said) = ranks(launcher, size, "rules", 60.0);
    assert!(output.status.success(), "{said}");
    for rank in 0..size {
        assert!(
            said.contains(&format!("rank {rank} of {size} by {engine}")),
            "{said}"
        );
    }
}

#[test]
fn open_mpi_keeps_the_rules() {
    keeps_the_rules(open_mpi(), 2, "Open MPI ");
    keeps_the_rules(open_mpi(), 4, "Open MPI ");
}

#[test]
fn mpich_keeps_the_rules_by_both_interfaces() {
    keeps_the_rules(mpich(), 2, "MPICH 5.0.2");
    for library in ["libmpi_abi.so.1", "libmpi.so.12"] {
        let mut launcher = mpich();
        launcher.env("TRAINER_MPI", mpich_home().join("lib").join(library));
        keeps_the_rules(launcher, 2, "MPICH 5.0.2");
    }
}

#[test]
fn a_rank_that_does_not_come_ends_the_job_in_time() {
    // Ranks have to start within the deadline too, which takes seconds on a busy machine.
    let ends = |launcher| {
        let (output, said) = at_once(|| ranks(launcher, 2, "late", 5.0));
        assert_eq!(output.status.code(), Some(3), "{said}");
        assert!(
            said.contains("rank 1 did not answer rank 0 in 5 s, in an exchange"),
            "{said}"
        );
    };
    std::thread::scope(|scope| {
        for launcher in [open_mpi(), mpich()] {
            scope.spawn(|| ends(launcher));
        }
    });
}

#[test]
fn a_rank_ends_all_with_its_code() {
    for (launcher, size) in [(open_mpi(), 4), (mpich(), 2)] {
        let (output, said) = at_once(|| ranks(launcher, size, "abort", 600.0));
        assert_eq!(output.status.code(), Some(3), "{said}");
    }
}

#[test]
fn a_piece_that_is_longer_than_expected_is_an_error() {
    for launcher in [open_mpi(), mpich()] {
        let (output, said) = ranks(launcher, 2, "misfit", 10.0);
        assert!(!output.status.success(), "{said}");
        assert!(
            said.contains("between ranks 1 and 0: a message failed: "),
            "{said}"
        );
    }
}

#[test]
fn a_library_of_another_launcher_is_told() {
    let mut launcher = mpich();
    launcher.env("TRAINER_MPI", open_mpi_library());
    let (output, said) = ranks(launcher, 2, "rules", 10.0);
    assert_eq!(output.status.code(), Some(7), "{said}");
    let sentence = "sees rank 0 of 1, but mpiexec started rank 1 of 2: the library belongs to another launcher";
    assert!(said.contains(sentence), "{said}");
}

#[test]
fn a_library_that_is_not_there_is_a_sentence() {
    let alone = |variables: &[(&str, &str)]| {
        let mut rank = Command::new(env!("CARGO_BIN_EXE_rank"));
        let output = rank
            .env_clear()
            .envs(variables.iter().copied())
            .args(["rules", "10"])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(7));
        String::from_utf8(output.stderr).unwrap()
    };
    let rank = [("PMI_RANK", "0"), ("PMI_SIZE", "1")];
    let named = alone(&[rank[0], rank[1], ("TRAINER_MPI", "/nowhere/libmpi.so")]);
    assert!(
        named.contains("TRAINER_MPI names `/nowhere/libmpi.so`, which does not load"),
        "{named}"
    );
    assert!(named.contains("No such file"), "{named}");
    let no_mpi = alone(&[rank[0], rank[1], ("TRAINER_MPI", "libm.so.6")]);
    assert!(no_mpi.contains("lacks a function"), "{no_mpi}");
    let torchrun = alone(&[("RANK", "0"), ("WORLD_SIZE", "2")]);
    assert!(torchrun.contains("mpirun -n 2 trainer"), "{torchrun}");
}
