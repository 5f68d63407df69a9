//! `trainer profile`: what a step's operations take, beside the least that they could.

use crate::workplace::Workplace;
use serde_json::Value;

#[test]
fn every_operation_of_a_step_is_timed() {
    let place = Workplace::new();
    let arguments = "profile --config small.toml --device cpu --recompute full --set hardware.peak_tflops=0.5 --json";
    let outcome = place.trainer(arguments).succeeds();
    let profile: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(profile["device"], "cpu");
    assert_eq!(profile["peak_tflops"], 0.5);
    let number = |value: &Value| value.as_f64().unwrap();
    let operations = profile["operations"].as_array().unwrap();
    let of = |name: &'static str| {
        operations
            .iter()
            .filter(move |row| row["operation"] == name)
    };
    let calls = |name| -> u64 { of(name).map(|row| row["calls"].as_u64().unwrap()).sum() };
    // Two micro-batches; replays come on top; matrices and vectors are updated in a call each.
    assert_eq!(calls("embedding"), 2);
    assert_eq!(calls("swiglu"), 2 * calls("swiglu_backward"));
    assert_eq!(calls("adamw"), 2);
    for product in of("matmul") {
        let sizes = product["sizes"].as_array().unwrap().iter().map(number);
        let flops = 2.0 * sizes.product::<f64>() * number(&product["calls"]);
        let expected = flops / 0.5e12 * 1e3;
        let floor = number(&product["flops_floor_ms"]);
        assert!((floor / expected - 1.0).abs() < 1e-9, "{product}");
    }
    let total: f64 = operations.iter().map(|row| number(&row["ms"])).sum();
    assert!((number(&profile["total_ms"]) / total - 1.0).abs() < 1e-9);
    assert!(
        operations
            .iter()
            .all(|row| number(&row["ms"]) > 0.0 && number(&row["bytes_floor_ms"]) > 0.0)
    );
    let longest_first = |pair: &[Value]| number(&pair[0]["ms"]) >= number(&pair[1]["ms"]);
    assert!(operations.windows(2).all(longest_first));
}

#[test]
fn offloaded_states_are_updated_while_they_are_timed() {
    let place = Workplace::new();
    let arguments = "profile --config small.toml --device cpu --offload-optimizer pinned";
    let outcome = place.trainer(arguments).succeeds();
    let first = outcome.stdout.lines().next().unwrap();
    assert!(
        first.starts_with("a step on cpu in f32, each operation waited for: "),
        "{first}"
    );
    assert!(outcome.stdout.contains("adamw"), "{}", outcome.stdout);
}

#[test]
fn a_limit_holds_for_timed_steps_too() {
    let place = Workplace::new();
    let outcome = place.trainer("profile --config small.toml --device cpu --memory-limit 100KiB");
    assert_eq!(outcome.code, Some(3), "{outcome:?}");
    assert!(
        outcome.stderr.contains("The limit is 100 KiB"),
        "{outcome:?}"
    );
}
