//! Losses and gradients that are not finite: exit code 6, and a record that says so.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::Value;

#[test]
fn a_learning_rate_that_is_too_high() {
    let place = Workplace::new();
    place
        .trainer("--config small.toml --lr 1e10 --save-final model --out run")
        .fails(
            6,
            &[
                "step 2 diverged",
                "loss",
                "gradient norm",
                "hint: a lower --lr",
            ],
        );
    let metrics = Metrics::read(&place, "run");
    assert_eq!(metrics.end_reason(), "diverged");
    let steps = metrics.steps();
    assert_eq!(steps.len(), 2, "the run ends there");
    assert_eq!(
        (&steps[0]["finite"], &steps[1]["finite"]),
        (&true.into(), &false.into())
    );
    assert_eq!(steps[1]["grad_norm"], Value::Null);
    assert_eq!(metrics.0.last().unwrap()["steps"], 2);
    assert!(
        !place.path("model/model.safetensors").exists(),
        "nothing to save"
    );
}

#[test]
fn weights_that_are_not_numbers() {
    let place = Workplace::new();
    place
        .trainer("init --config small.toml --out model")
        .succeeds();
    let path = place.path("model/model.safetensors");
    let mut weights = std::fs::read(&path).unwrap();
    let last = weights.len() - 4;
    weights[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&path, weights).unwrap();
    place.trainer("--init-from model --seq 32 --out run").fails(
        6,
        &[
            "step 1 diverged",
            "NaN",
            "hint: nothing was trained yet",
            "--init-from",
        ],
    );
    let metrics = Metrics::read(&place, "run");
    assert_eq!(metrics.end_reason(), "diverged");
    assert_eq!(metrics.steps()[0]["loss"], Value::Null);
}
