//! Identical commands write identical step lines, whatever the number of threads.

use crate::metrics::Metrics;
use crate::workplace::Workplace;

#[test]
fn two_runs_and_any_number_of_threads() {
    let place = Workplace::new();
    let run = |out: &str, more: &str| {
        place
            .trainer(&format!("--config small.toml --steps 6 --out {out} {more}"))
            .succeeds();
        Metrics::read(&place, out)
    };
    let first = run("first", "");
    assert_eq!(first.steps().len(), 6);
    let settings = ["", "--threads 1", "--threads 2", "--seed 0", "--quiet"];
    for (index, more) in settings.into_iter().enumerate() {
        let other = run(&format!("again-{index}"), more);
        assert_eq!(first.untimed_steps(), other.untimed_steps(), "{more}");
    }
    let other_seed = run("seed", "--seed 1");
    assert_ne!(first.untimed_steps(), other_seed.untimed_steps());
}

/// More would wait for one another: with 2,000 on two processors a step took a minute.
#[test]
fn no_more_threads_than_processors() {
    let place = Workplace::new();
    let said = place.trainer("--config small.toml --steps 2 --threads 2000 --out many");
    let stderr = &said.succeeds().stderr;
    let sentence = "2000 threads are asked for, and this process may use ";
    assert_eq!(stderr.matches(sentence).count(), 1, "{stderr}");
    place
        .trainer("--config small.toml --steps 2 --threads 1 --out one")
        .succeeds();
    let [many, one] = ["many", "one"].map(|run| Metrics::read(&place, run).untimed_steps());
    assert_eq!(many, one);
    let found = place
        .trainer("doctor --json --threads 2000")
        .succeeds()
        .stdout;
    let found: serde_json::Value = serde_json::from_str(&found).unwrap();
    let processors = std::thread::available_parallelism().unwrap().get();
    assert_eq!(found["host"]["threads"], processors);
}

#[test]
fn bf16_too() {
    let place = Workplace::new();
    let run = |threads: usize| {
        let out = format!("threads-{threads}");
        let command = format!("--config small.toml --dtype bf16 --threads {threads} --out {out}");
        place.trainer(&command).succeeds();
        Metrics::read(&place, &out).untimed_steps()
    };
    let one = run(1);
    assert_eq!(run(2), one);
}
