//! A run keeps its weights: the last step is saved unless that is not wanted.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::Value;

#[test]
fn the_last_step_is_saved_and_the_start_says_where() {
    let place = Workplace::new();
    place
        .trainer("--config plain.toml --out nothing --save-every 0")
        .succeeds();
    let outcome = place.trainer("--config plain.toml --out run").succeeds();
    let said = "the last step will be saved in run/checkpoints/step-4 (";
    assert!(outcome.stderr.contains(said), "{outcome:?}");
    assert!(
        outcome
            .stdout
            .contains("checkpoint run/checkpoints/step-4\n"),
        "{outcome:?}"
    );
    assert_eq!(place.names("run/checkpoints"), ["step-4"]);
    assert!(!place.path("nothing/checkpoints").exists());
    // It costs the steps nothing: neither bits nor memory of device or host.
    let [run, nothing] = ["run", "nothing"].map(|run| Metrics::read(&place, run).untimed_steps());
    assert_eq!(run, nothing);
    let [run, nothing] = ["run", "nothing"].map(|run| place.text(&format!("{run}/plan.json")));
    assert_eq!(run, nothing);
    // What is saved can be used, and gone on with.
    place
        .trainer("generate run --prompt a --max-tokens 2")
        .succeeds();
    place
        .trainer("--resume latest --out run --steps 5 --quiet")
        .succeeds();
    assert_eq!(place.names("run/checkpoints"), ["step-4", "step-5"]);
}

/// A run whose last steps were skipped fails, and what it learnt before is kept.
#[test]
fn a_run_that_diverged_at_its_end_is_saved_too() {
    let place = Workplace::new();
    place
        .trainer("--config plain.toml --lr 1e10 --out run")
        .fails(6, &["step 4 diverged", "the last 3 steps were skipped"]);
    assert_eq!(place.names("run/checkpoints"), ["step-4"]);
    let state = place.text("run/checkpoints/step-4/trainer_state.json");
    let state: Value = serde_json::from_str(&state).unwrap();
    assert_eq!(
        (&state["updates"], &state["skipped"]),
        (&1.into(), &3.into())
    );
}

/// One that is to keep nothing keeps what a signal ends, and refuses to choose among checkpoints.
#[test]
fn what_does_not_go_with_saving_nothing() {
    let place = Workplace::new();
    for flag in ["--keep-last 2", "--keep-best --eval-every 1"] {
        place
            .trainer(&format!("--config plain.toml --save-every 0 {flag}"))
            .fails(2, &["--save-every 0 writes none"]);
    }
    place.file(
        "eval.txt",
        "the rain in spain stays mainly in the plain ".repeat(9),
    );
    let best = "--config plain.toml --steps 6 --lr 1 --eval-every 1 --eval-data eval.txt --keep-best --keep-last 1 --quiet --out run";
    place.trainer(best).succeeds();
    let evals = Metrics::read(&place, "run");
    let lowest = evals.of_kind("eval").filter(|eval| eval["is_best"] == true);
    let lowest = lowest.last().unwrap()["step"].as_u64().unwrap();
    assert!(lowest < 6, "the test needs an early best");
    let kept = place.names("run/checkpoints");
    assert_eq!(kept, [format!("step-{lowest}"), "step-6".into()]);
}
