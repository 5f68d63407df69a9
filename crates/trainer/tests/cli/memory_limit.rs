//! `--memory-limit`: the plan's peak is enough, one granule less is not.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::Value;

#[test]
fn the_limit_acts_to_the_granule() {
    let place = Workplace::new();
    for mode in ["none", "core_attn", "full"] {
        let settings = format!("--config small.toml --device cpu --recompute {mode}");
        let plan = place.trainer(&format!("plan --json {settings}")).succeeds();
        let plan: Value = serde_json::from_str(&plan.stdout).unwrap();
        let peak = plan["peak_bytes"].as_u64().unwrap();
        let granule = plan["granularity_bytes"].as_u64().unwrap();
        let run = |limit: u64, out: &str| {
            place.trainer(&format!(
                "{settings} --memory-limit {limit} --out {mode}-{out}"
            ))
        };
        let enough = run(peak, "enough").succeeds();
        assert!(!enough.stderr.contains("WARN"), "{enough:?}");

        let short =
            run(peak - granule, "short").fails(3, &["hint: `trainer plan`", "--micro-batch"]);
        assert!(short.stderr.contains("WARN the plan's peak"), "{short:?}");
        let limit = format!("({} bytes)", peak - granule);
        assert!(short.stderr.contains(&limit), "{short:?}");
        // People search for PyTorch's words.
        let begin = "\nerror: CPU out of memory. Tried to allocate ";
        assert!(short.stderr.contains(begin), "{short:?}");
        let metrics = Metrics::read(&place, &format!("{mode}-short"));
        assert_eq!(
            (metrics.steps().len(), metrics.end_reason()),
            (0, "out_of_memory")
        );
    }
}

#[test]
fn a_limit_below_the_weights() {
    let place = Workplace::new();
    place
        .trainer("--config small.toml --memory-limit 1000 --out run")
        .fails(
            3,
            &["CPU out of memory. Tried to allocate", "load", "1000 B"],
        );
    assert_eq!(Metrics::read(&place, "run").end_reason(), "out_of_memory");
}

#[test]
fn a_share_of_the_machine() {
    let place = Workplace::new();
    place
        .trainer("--config small.toml --steps 1 --memory-limit 95% --out run")
        .succeeds();
    place
        .trainer("--config small.toml --steps 1 --memory-limit 0.0000001%")
        .fails(3, &["CPU out of memory"]);
}
