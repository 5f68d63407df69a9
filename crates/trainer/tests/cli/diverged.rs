//! Losses and gradients that are not finite: exit code 6, and a record that says so.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::Value;

/// One step is made, then none is finite.
const TOO_HIGH: &str = "--config small.toml --lr 1e10 --save-final model";

#[track_caller]
fn assert_skipped(metrics: &Metrics, steps: usize, skipped: usize) {
    assert_eq!(metrics.end_reason(), "diverged");
    let records = metrics.steps();
    assert_eq!(records.len(), steps, "the run ends there");
    for (index, step) in records.into_iter().enumerate() {
        let finite = index < steps - skipped;
        assert_eq!(step["finite"], finite, "step {}", index + 1);
        assert_eq!(step["grad_norm"] == Value::Null, !finite);
    }
    let end = metrics.0.last().unwrap();
    assert_eq!(
        (&end["steps"], &end["skipped_steps"]),
        (&steps.into(), &skipped.into())
    );
}

/// Three steps in a row may be skipped; the fourth ends the run.
#[test]
fn a_learning_rate_that_is_too_high() {
    let place = Workplace::new();
    let words = [
        "step 5 diverged",
        "loss",
        "gradient norm",
        "the last 4 steps were skipped",
        "changed neither weights nor optimizer state",
        "hint: a lower --lr",
    ];
    let outcome = place.trainer(&format!("{TOO_HIGH} --steps 9 --out run"));
    let outcome = outcome.fails(6, &words);
    for step in 2..=5 {
        let warning = format!("WARN step {step} was skipped");
        assert!(outcome.stderr.contains(&warning), "{outcome:?}");
    }
    assert_skipped(&Metrics::read(&place, "run"), 5, 4);
    assert!(
        !place.path("model/model.safetensors").exists(),
        "nothing to save"
    );
}

#[test]
fn how_many_steps_may_be_skipped_is_a_setting() {
    for (max_skipped, steps) in [(0, 2), (1, 3), (5, 7)] {
        let place = Workplace::new();
        let set = format!("--set train.max_skipped={max_skipped}");
        place
            .trainer(&format!("{TOO_HIGH} --steps 9 {set} --out run"))
            .fails(6, &[&format!("step {steps} diverged")]);
        assert_skipped(&Metrics::read(&place, "run"), steps, steps - 1);
    }
}

/// Skipped steps change nothing, so what is saved is the weights of the last step that was made.
#[test]
fn a_run_that_ends_in_skipped_steps_saves_and_fails() {
    let place = Workplace::new();
    let words = ["step 4 diverged", "the last 3 steps were skipped"];
    place
        .trainer(&format!("{TOO_HIGH} --out run"))
        .fails(6, &words);
    assert_skipped(&Metrics::read(&place, "run"), 4, 3);
    let long = std::fs::read(place.path("model/model.safetensors")).unwrap();
    std::fs::remove_dir_all(place.path("model")).unwrap();
    place
        .trainer(&format!("{TOO_HIGH} --steps 1 --out one"))
        .succeeds();
    let one = std::fs::read(place.path("model/model.safetensors")).unwrap();
    assert!(long == one, "the weights of step 1");
}

/// Makes the last number of a file NaN.
fn spoil(place: &Workplace, file: &str) {
    let mut weights = std::fs::read(place.path(file)).unwrap();
    let last = weights.len() - 4;
    weights[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    place.file(file, weights);
}

/// What evaluates or merges them ends with 4 and writes nothing; training ends as one that diverges.
#[test]
fn adapters_that_are_not_numbers() {
    let place = Workplace::new();
    place
        .trainer("init --config small.toml --out model")
        .succeeds();
    place
        .trainer("train --init-from model --lora 2 --seq 32 --steps 1 --set data.any_tokenizer=true --save-final adapter --out run")
        .succeeds();
    spoil(&place, "adapter/adapter_model.safetensors");
    place.file(
        "pairs.jsonl",
        r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#,
    );
    let pairs = "prepare pairs.jsonl --tokenizer bytes --out pairs";
    place.trainer(pairs).succeeds();
    for (command, words) in [
        (
            "eval adapter --data small.toml",
            "adapter cannot be used: its losses are not finite",
        ),
        (
            "eval adapter --data pairs --seq 32 --set data.any_tokenizer=true --reference reference.json",
            "adapter cannot be used: its losses are not finite",
        ),
        (
            "export adapter --merge --out merged",
            "has values that are not finite",
        ),
        (
            "export adapter --out copied",
            "has values that are not finite",
        ),
    ] {
        place.trainer(command).fails(4, &[words]);
    }
    for left in ["reference.json", "merged", "copied"] {
        assert!(!place.path(left).exists(), "{left}");
    }
    let outcome =
        place.trainer("train --lora-from adapter --seq 32 --set data.any_tokenizer=true --out on");
    let outcome = outcome.fails(6, &["look at --lora-from, and at the model under it"]);
    assert!(
        !outcome.stderr.contains("--init-from"),
        "{}",
        outcome.stderr
    );
}

#[test]
fn weights_that_are_not_numbers() {
    let place = Workplace::new();
    place
        .trainer("init --config small.toml --out model")
        .succeeds();
    spoil(&place, "model/model.safetensors");
    place
        .trainer("eval model --data small.toml")
        .fails(4, &["model cannot be used: its losses are not finite"]);
    place.trainer("--init-from model --seq 32 --out run").fails(
        6,
        &[
            "step 4 diverged",
            "changed neither weights nor optimizer state",
            "NaN",
            "hint: nothing was trained yet",
            "--init-from",
        ],
    );
    let metrics = Metrics::read(&place, "run");
    assert_eq!(metrics.end_reason(), "diverged");
    assert_eq!(metrics.steps()[0]["loss"], Value::Null);
}
