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
    let settings = [
        "",
        "--threads 1",
        "--threads 2",
        "--threads 4",
        "--seed 0",
        "--quiet",
    ];
    for (index, more) in settings.into_iter().enumerate() {
        let other = run(&format!("again-{index}"), more);
        assert_eq!(first.untimed_steps(), other.untimed_steps(), "{more}");
    }
    let other_seed = run("seed", "--seed 1");
    assert_ne!(first.untimed_steps(), other_seed.untimed_steps());
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
    assert_eq!(run(4), one);
}
