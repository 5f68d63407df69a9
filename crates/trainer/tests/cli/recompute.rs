//! Every form of a recompute specification through the binary: the same losses, other peaks.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::Value;

/// Loss, gradient norm and replays of every step, and the planned and measured peaks.
fn run(place: &Workplace, arguments: &str, out: &str) -> (Vec<(Value, Value)>, u64, u64) {
    place
        .trainer(&format!(
            "--config small.toml --steps 3 --out {out} {arguments}"
        ))
        .succeeds();
    let metrics = Metrics::read(place, out);
    let steps = metrics.steps();
    let numbers = steps
        .iter()
        .map(|step| (step["loss"].clone(), step["grad_norm"].clone()));
    let bytes = |name: &str| steps[0][name].as_u64().unwrap();
    assert_eq!(
        bytes("peak_bytes"),
        bytes("planned_peak_bytes"),
        "{arguments}"
    );
    let replays = steps[0]["replayed"].as_object().unwrap().values();
    let replays = replays.map(|count| count.as_u64().unwrap()).sum();
    (numbers.collect(), bytes("peak_bytes"), replays)
}

#[test]
fn every_form_gives_the_same_losses() {
    let place = Workplace::new();
    let none = run(&place, "--recompute none", "none");
    assert_eq!(none.2, 0);
    for (number, arguments) in [
        "--recompute qkv,attn_out,mlp_act",
        "--recompute full:uniform:2",
        "--recompute full:block:1",
        "--set recompute.layers={\"1\"=\"full\"}",
        "--recompute core_attn --set recompute.layers={\"0\"=\"none\"}",
    ]
    .into_iter()
    .enumerate()
    {
        let other = run(&place, arguments, &format!("run-{number}"));
        assert!(
            other.2 > 0 && other.1 != none.1,
            "{arguments} changes something"
        );
        assert_eq!(other.0, none.0, "{arguments}");
    }
}

/// Megatron's flags and our specification are two names of one thing.
#[test]
fn megatrons_flags_mean_the_same() {
    let place = Workplace::new();
    for (number, (flags, spec)) in [
        ("--recompute-granularity selective", "core_attn"),
        (
            "--recompute-granularity selective --recompute-modules mlp layernorm",
            "mlp,layernorm",
        ),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            "full:uniform:2",
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
            "full:block:1",
        ),
        ("--recompute-granularity none", "none"),
    ]
    .into_iter()
    .enumerate()
    {
        let megatron = run(&place, flags, &format!("megatron-{number}"));
        let ours = run(
            &place,
            &format!("--recompute {spec}"),
            &format!("ours-{number}"),
        );
        assert_eq!(megatron, ours, "{flags}");
        let config = place.text(&format!("megatron-{number}/config.toml"));
        assert!(config.contains(&format!("spec = \"{spec}\"")), "{config}");
    }
}
