//! `--objective policy`: planned, and left to programs.

use crate::workplace::Workplace;
use serde_json::Value;

/// A program makes the steps, so that `train` and measuring `bench` refuse them, and say who makes them.
#[test]
fn a_policy_is_planned_and_its_steps_are_made_by_a_program() {
    let place = Workplace::new();
    let policy = "--config small.toml --objective policy";
    let plan = place.trainer(&format!("plan {policy} --json")).succeeds();
    let plan: Value = serde_json::from_str(&plan.stdout).unwrap();
    assert!(
        plan["eval_peak_bytes"].is_u64(),
        "log-probabilities are planned"
    );
    let words = [
        "no data to train on",
        "policy_step",
        "plan --objective policy",
    ];
    for command in ["train", "bench --device cpu"] {
        place
            .trainer(&format!("{command} {policy}"))
            .fails(2, &words);
    }
}

#[test]
fn what_a_policy_does_not_go_with_is_named() {
    let place = Workplace::new();
    for (flags, words) in [
        ("--config small.toml --packing pad", &["--packing"][..]),
        (
            "--config small.toml --eval-every 2",
            &["`policy_clip_share`", "--eval-every"],
        ),
        ("--config tiny-moe", &["not built", "model.router_aux"]),
        (
            "--config small.toml --dtype bf16 --fp8 tensor",
            &["--fp8", "ratios"],
        ),
        (
            "--config small.toml --context-parts 2",
            &["whole sequences"],
        ),
        ("--config small.toml --ranks 2 --pp 2", &["the whole model"]),
        (
            "--config small.toml --set dpo.beta=0.2",
            &["`dpo.beta`", "--objective dpo"],
        ),
    ] {
        place
            .trainer(&format!("plan --objective policy {flags}"))
            .fails(2, words);
    }
}
