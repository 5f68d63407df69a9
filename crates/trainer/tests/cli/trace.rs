//! `--trace`: pictures of a step that has run, or that only has been planned or timed.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::Value;

/// The largest total of the trace's counters.
fn traced_peak(place: &Workplace, folder: &str) -> u64 {
    for name in ["snapshot.pickle", "timeline.svg"] {
        assert!(place.path(&format!("{folder}/{name}")).is_file(), "{name}");
    }
    let trace: Value = serde_json::from_str(&place.text(&format!("{folder}/trace.json"))).unwrap();
    let events = trace["traceEvents"].as_array().unwrap().iter();
    let totals = events.filter(|event| event["ph"] == "C" && event["name"] == "total");
    let bytes = totals.map(|event| {
        let values = event["args"].as_object().unwrap().values();
        values.map(|bytes| bytes.as_u64().unwrap()).sum()
    });
    bytes.max().unwrap()
}

#[test]
fn the_peak_in_pictures_is_that_of_the_run_its_plan_and_its_profile() {
    let place = Workplace::new();
    let flags = "--config small.toml --device cpu --recompute core_attn,mlp";
    place
        .trainer(&format!("{flags} --steps 2 --out traced --trace"))
        .succeeds();
    place
        .trainer(&format!("{flags} --steps 2 --out plain"))
        .succeeds();
    let (traced, plain) = (
        Metrics::read(&place, "traced"),
        Metrics::read(&place, "plain"),
    );
    let of = |metrics: &Metrics, name: &str| -> Vec<Value> {
        metrics
            .steps()
            .into_iter()
            .map(|step| step[name].clone())
            .collect()
    };
    for name in ["loss", "peak_bytes", "replayed"] {
        assert_eq!(
            of(&traced, name),
            of(&plain, name),
            "a traced run is the same run"
        );
    }
    assert!(!place.path("plain/memory").exists());
    place
        .trainer(&format!("plan {flags} --trace paper"))
        .succeeds();
    place
        .trainer(&format!("profile {flags} --trace timed"))
        .succeeds();
    for folder in ["traced/memory", "paper", "timed"] {
        assert_eq!(
            Value::from(traced_peak(&place, folder)),
            of(&traced, "peak_bytes")[0],
            "{folder}"
        );
    }
}

/// What was live when a lease was refused is what one wants to see.
#[test]
fn a_failure_is_drawn_too() {
    let place = Workplace::new();
    let flags = "--config small.toml --device cpu";
    let plan = place.trainer(&format!("plan --json {flags}")).succeeds();
    let plan: Value = serde_json::from_str(&plan.stdout).unwrap();
    let limit = plan["peak_bytes"].as_u64().unwrap() - 256;
    let flags = format!("{flags} --memory-limit {limit} --force --trace --out failed");
    place.trainer(&flags).fails(3, &["out of memory"]);
    assert!(traced_peak(&place, "failed/memory") <= limit);
}

#[test]
fn a_command_without_a_run_directory_wants_a_folder() {
    let place = Workplace::new();
    for command in ["plan", "profile"] {
        let flags = format!("{command} --config small.toml --device cpu --trace");
        place.trainer(&flags).fails(2, &["--trace DIR"]);
    }
    let bench = "bench --config small.toml --device cpu --trace";
    place.trainer(bench).fails(2, &["bench does not trace"]);
    let flags = "--config small.toml --device cpu --trace=folder";
    place.trainer(flags).fails(2, &["--out"]);
}
