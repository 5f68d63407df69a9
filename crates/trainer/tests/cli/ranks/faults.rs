//! What one rank cannot do ends the job in seconds, with its exit code and its name.

use crate::metrics::Metrics;
use crate::ranks::job::{command, command_but_for_one, open_mpi, place};
use crate::ranks::signals::{
    at_once, endless, ends, goes_on_as_if_unbroken, process_of_rank, saved, send,
};
use crate::workplace::{Workplace, outcome, until};
use serde_json::Value;
use std::process::Command;

/// What a job said that failed at once, with this code.
#[track_caller]
fn fails(job: Command, code: i32) -> String {
    let ended = at_once(|| outcome(job, ""));
    assert_eq!(ended.code, Some(code), "{ended:?}");
    assert!(!ended.stderr.contains("panicked"), "{ended:?}");
    ended.stderr
}

/// What the first rank says is said once, by it.
#[track_caller]
fn names(said: &str, words: &[&str]) {
    // The launcher may mix what it says itself into a line.
    let mut lines = said.lines().map(str::trim_start);
    let line = lines.find(|line| line.starts_with("error: "));
    let line = line.unwrap_or_else(|| panic!("no error of rank 0: {said}"));
    for word in words {
        assert!(line.contains(word), "no {word:?} in {line}\n{said}");
    }
}

fn words(place: &Workplace, name: &str) -> Value {
    serde_json::from_str(&place.text(name)).unwrap()
}

const TRAIN: &str = "--config llama.toml --accum 2 --quiet --out run";

#[test]
fn another_setting() {
    let place = place();
    let job = command_but_for_one(&place, open_mpi(2), TRAIN, "--micro-batch 1 --lr 3");
    let said = fails(job, 2);
    names(
        &said,
        &[
            "rank 1 has batch.micro 1, rank 0 has 2",
            "rank 1 has lr.peak 3.0, rank 0 has 0.01",
        ],
    );
    assert!(!place.path("run").exists(), "nothing is written");
}

#[test]
fn another_grid() {
    let place = place();
    let job = command_but_for_one(&place, open_mpi(2), TRAIN, "--cp 2");
    let said = fails(job, 2);
    names(&said, &["rank 1 has parallel.context 2, rank 0 has 1"]);
    assert!(!place.path("run").exists(), "nothing is written");
}

#[test]
fn other_data() {
    let place = place();
    place.file(
        "other.safetensors",
        crate::ranks::job::data(&[0, 1, 2, 3], Some(2)),
    );
    let job = command_but_for_one(&place, open_mpi(2), TRAIN, "--data other.safetensors");
    names(&fails(job, 2), &["rank 1 has the data"]);
}

#[test]
fn a_file_that_one_rank_lacks() {
    let place = place();
    let job = command_but_for_one(&place, open_mpi(4), TRAIN, "--data nowhere.safetensors");
    let said = fails(job, 4);
    names(&said, &["rank 1 (", "nowhere.safetensors"]);
    assert_eq!(said.matches("rank 1: error: ").count(), 1, "{said}");
    assert!(
        !said.contains("rank 2: error"),
        "what all know one says: {said}"
    );
}

/// Each rank reads its own rows: one alone meets the token that the model does not have, in the middle of the run, and all end
/// with its sentence.
#[test]
fn data_that_one_rank_cannot_read() {
    let place = place();
    let mut data = crate::ranks::job::data(&[0, 1, 2, 3], None);
    let header = u64::from_le_bytes(*data.first_chunk().unwrap()) as usize;
    // In the second step's second micro-batch, which is of rank 1.
    let token = crate::ranks::job::first_token(1, 1);
    data[8 + header + 4 * token..][..4].copy_from_slice(&131_i32.to_le_bytes());
    place.file("spoilt.safetensors", data);
    let all = format!("{TRAIN} --data spoilt.safetensors");
    let said = fails(command(&place, open_mpi(2), &all), 4);
    names(&said, &["rank 1 (", "spoilt.safetensors", "131"]);
    let own = said.matches("rank 1: error: data file spoilt.safetensors");
    assert_eq!(own.count(), 1, "{said}");
    let left = words(&place, "run/rank-1.json");
    assert_eq!((&left["exit_code"], &left["step"]), (&4.into(), &1.into()));
    assert_eq!(Metrics::read(&place, "run").steps().len(), 1);
}

#[test]
fn a_folder_that_is_taken() {
    let place = place();
    place.folder("run");
    place.file("run/something", "");
    let said = fails(command(&place, open_mpi(2), TRAIN), 2);
    names(&said, &["run is not empty"]);
    assert_eq!(said.matches("is not empty").count(), 1, "{said}");
}

/// Refused beforehand, when all can still end together, and tried anyway: then in the middle of a step that others wait in.
#[test]
fn memory_that_one_rank_lacks() {
    let place = place();
    let plan = "plan --config llama.toml --accum 2 --zero 1 --ranks 2 --rank 1 --json";
    let plan: Value = serde_json::from_str(&place.trainer(plan).succeeds().stdout).unwrap();
    let bytes = |name: &str| plan[name].as_u64().unwrap();
    let limit = bytes("peak_bytes") - bytes("granularity_bytes");
    assert!(
        limit > bytes("persistent_bytes"),
        "what is refused is asked for in a step"
    );
    for (force, out) in [("", "beforehand"), ("--force", "in-a-step")] {
        let all = format!("--config llama.toml --accum 2 --quiet --zero 1 --out {out}");
        let of_one = format!("--memory-limit {limit} {force}");
        let job = command_but_for_one(&place, open_mpi(2), &all, &of_one);
        let said = fails(job, 3);
        let own = said.matches("rank 1: error: CPU out of memory");
        assert_eq!(own.count(), 1, "{said}");
        assert!(said.contains("rank 1: hint: cheapest fix: "), "{said}");
        let left = words(&place, &format!("{out}/rank-1.json"));
        assert_eq!((&left["rank"], &left["exit_code"]), (&1.into(), &3.into()));
        assert_eq!(
            (&left["lost_others"], &left["step"]),
            (&false.into(), &0.into())
        );
        let report = words(&place, &format!("{out}/oom.json"));
        assert!(
            report["fixes"].is_array() && report["phase"] != "load",
            "{report}"
        );
        if force.is_empty() {
            names(&said, &["rank 1 (", "out of memory"]);
        }
    }
}

#[test]
fn a_rank_that_is_killed() {
    let place = place();
    let child = endless(&place, 2, "--zero 3");
    send("KILL", process_of_rank(&child, 1));
    let (code, said) = ends(child);
    // That of the shell for a killed process: Open MPI's own.
    assert_eq!(code, Some(137), "{said}");
    assert!(
        said.contains("rank 1") && said.contains("signal 9"),
        "{said}"
    );
}

/// Whichever stage of a pipeline dies, what was saved before goes on with the bits of a run in which none did.
#[test]
fn a_stage_that_is_killed() {
    let saving = "--save-every 1 --keep-last 3";
    let pipeline =
        format!("--set model.layers=4 --pp 2 --pipeline-schedule interleaved --accum 2 {saving}");
    for rank in 0..2 {
        let place = place();
        let mut child = endless(&place, 2, &pipeline);
        until(&mut child, || saved(&place).is_some());
        send("KILL", process_of_rank(&child, rank));
        let (code, said) = ends(child);
        assert_eq!(code, Some(137), "{said}");
        let named = format!("rank {rank}");
        assert!(said.contains(&named) && said.contains("signal 9"), "{said}");
        goes_on_as_if_unbroken(&place, &pipeline);
    }
}

#[test]
fn a_stage_that_stops() {
    let place = place();
    let more = "--pp 2 --accum 2 --set collectives.timeout_s=5";
    let child = endless(&place, 2, more);
    send("STOP", process_of_rank(&child, 0));
    let (code, said) = ends(child);
    assert_eq!(code, Some(5), "{said}");
    let sentence = "rank 1: error: rank 0 (stage 0 of 2) did not answer rank 1 (stage 1 of 2)";
    assert!(said.contains(sentence), "{said}");
    let left = words(&place, "run/rank-1.json");
    assert_eq!(left["name"], "1 (stage 1 of 2)");
    assert!(left["micro_batches"].is_number(), "{left}");
}

#[test]
fn a_rank_that_stops() {
    let place = place();
    let child = endless(&place, 2, "--zero 2 --set collectives.timeout_s=5");
    send("STOP", process_of_rank(&child, 1));
    let (code, said) = ends(child);
    assert_eq!(code, Some(5), "{said}");
    names(&said, &["rank 1 did not answer"]);
    let left = words(&place, "run/rank-0.json");
    assert_eq!(
        (&left["exit_code"], &left["lost_others"]),
        (&5.into(), &true.into())
    );
    assert!(left["step"].as_u64().unwrap() > 0, "{left}");
}

/// A machine that is slow on paper: ranks wait for each other longer than `collectives.timeout_s`, for twenty times the step that was
/// planned. Then the error names the rank that stopped, and its place.
#[test]
fn a_rank_that_is_slow_as_planned() {
    let place = place();
    let more = "--cp 2 --zero 2 --set collectives.timeout_s=5 --set hardware.peak_tflops=0.00003";
    let child = endless(&place, 2, more);
    send("STOP", process_of_rank(&child, 1));
    let (code, said) = ends(child);
    assert_eq!(code, Some(5), "{said}");
    let sentence = "rank 1 (group 0, part 1 of 2) did not answer rank 0 (group 0, part 0 of 2) in ";
    // In an exchange nobody knows the step.
    names(&said, &[sentence]);
    let waited = said.split(sentence).nth(1).unwrap();
    let waited: f64 = waited.split(' ').next().unwrap().parse().unwrap();
    assert!(waited >= 10.0, "{said}");
    assert_eq!(
        words(&place, "run/rank-0.json")["name"],
        "0 (group 0, part 0 of 2)"
    );
}

#[test]
fn a_library_that_is_not_there() {
    let place = place();
    let mut job = command(&place, open_mpi(2), TRAIN);
    job.env("TRAINER_MPI", "/nowhere/libmpi.so");
    let said = fails(job, 5);
    // Without the library ranks cannot agree who reports the error. Each reports its own, and the
    // launcher may end a rank before it has.
    let words = "error: TRAINER_MPI names `/nowhere/libmpi.so`, which does not load";
    assert!(said.contains(words), "{said}");
}

/// A launcher's words that make no sense are refused, not guessed at.
#[test]
fn half_a_launcher() {
    let place = place();
    place
        .trainer_with(TRAIN, &[("RANK", "1")])
        .fails(2, &["WORLD_SIZE"]);
    let torchrun = [
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "29500"),
    ];
    place
        .trainer_with(TRAIN, &torchrun)
        .fails(2, &["mpirun -n 2"]);
}

/// What one process does, several would do over one another.
#[test]
fn what_is_no_training_is_refused_under_a_launcher() {
    let place = place();
    let torchrun = [
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "29500"),
    ];
    for (command, instead) in [
        ("export nowhere --out there", "one process"),
        ("plan", "--ranks N"),
    ] {
        place
            .trainer_with(command, &torchrun)
            .fails(2, &[instead, "2 of them"]);
    }
}
