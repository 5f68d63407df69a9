//! A request to end that one rank hears ends all of them together, at a step's end, with a checkpoint.

use crate::metrics::Metrics;
use crate::ranks::job::{command, open_mpi, place};
use crate::workplace::{Workplace, outcome, until, until_end};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The process that is a rank of a job.
pub fn process_of_rank(mpirun: &Child, rank: usize) -> u32 {
    let variable = format!("OMPI_COMM_WORLD_RANK={rank}");
    let is_it = |pid: u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat
            .rsplit_once(") ")
            .and_then(|(_, fields)| fields.split(' ').nth(1)?.parse().ok());
        parent == Some(mpirun.id())
            && environment
                .split(|byte| *byte == 0)
                .any(|one| one == variable.as_bytes())
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(|pid| is_it(*pid))
        .unwrap_or_else(|| panic!("no process is rank {rank}"))
}

#[track_caller]
pub fn send(name: &str, pid: u32) {
    let sent = Command::new("sh")
        .args(["-c", &format!("kill -s {name} {pid}")])
        .status();
    assert!(sent.unwrap().success());
}

/// A job that trains without end, once it has made a step.
pub fn endless(place: &Workplace, ranks: usize, more: &str) -> Child {
    place.file(
        "text.txt",
        "what is learnt here does not matter at all. ".repeat(400),
    );
    let arguments = format!(
        "--config llama.toml --data text.txt --set data.seq=24 --set model.vocab=256 --steps 100000000 --set lr.schedule=constant --quiet --out run {more}"
    );
    let mut job = command(place, open_mpi(ranks), &arguments);
    let mut child = job
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let last = format!("run/ranks/{}/metrics.jsonl", ranks - 1);
    until(&mut child, || {
        let text = std::fs::read_to_string(place.path(&last)).unwrap_or_default();
        text.contains(r#""kind":"step""#)
    });
    child
}

/// What is promised within ten seconds: a machine with much other work takes several times as long. A hang lasts for
/// `collectives.timeout_s`, ten minutes.
#[track_caller]
pub fn at_once<T>(what: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = what();
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(240), "it took {took:?}");
    result
}

/// How a job ended that something happened to just now.
#[track_caller]
pub fn ends(mut child: Child) -> (Option<i32>, String) {
    at_once(|| until_end(&mut child));
    let output = child.wait_with_output().unwrap();
    (
        output.status.code(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

/// The last step that is saved, if one is.
pub fn saved(place: &Workplace) -> Option<usize> {
    let entries = std::fs::read_dir(place.path("run/checkpoints")).ok()?;
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let step = |name: String| name.strip_prefix("step-")?.parse().ok();
    names.filter_map(step).max()
}

/// Two steps more than were saved have the bits of a run that nobody ended.
#[track_caller]
pub fn goes_on_as_if_unbroken(place: &Workplace, more: &str) {
    let steps = saved(place).unwrap() + 2;
    let all = format!("--quiet --out run --resume latest --steps {steps}");
    outcome(command(place, open_mpi(2), &all), &all).succeeds();
    let whole = format!(
        "--config llama.toml --data text.txt --set data.seq=24 --set model.vocab=256 --set lr.schedule=constant {more} --quiet --out whole --steps {steps}"
    );
    outcome(command(place, open_mpi(2), &whole), &whole).succeeds();
    for folder in ["", "/ranks/0", "/ranks/1"] {
        let [run, whole] = ["run", "whole"]
            .map(|run| Metrics::read(place, &format!("{run}{folder}")).untimed_steps());
        assert!(run == whole, "{folder}");
    }
}

#[test]
fn one_rank_is_told_and_all_end() {
    is_told_to_end("--zero 2");
}

/// At any moment of a step: the stages end it together.
#[test]
fn one_stage_is_told_and_all_end() {
    is_told_to_end("--set model.layers=4 --pp 2 --pipeline-schedule interleaved --accum 2");
}

fn is_told_to_end(more: &str) {
    let place = place();
    let child = endless(&place, 2, more);
    send("TERM", process_of_rank(&child, 1));
    let (code, said) = ends(child);
    assert_eq!(code, Some(143), "{said}");
    let run = Metrics::read(&place, "run");
    let made = run.steps().len();
    let message = format!(
        "error: interrupted after step {made}, whose state is in run/checkpoints/step-{made}; rank 1 was told to end"
    );
    assert_eq!(said.matches(&message).count(), 1, "{said}");
    assert_eq!(run.end_reason(), "interrupted");
    let other = Metrics::read(&place, "run/ranks/1");
    assert_eq!(
        (other.steps().len(), other.end_reason()),
        (made, "interrupted")
    );
    goes_on_as_if_unbroken(&place, more);
}
