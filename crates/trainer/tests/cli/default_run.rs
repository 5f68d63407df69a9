//! What a newcomer types first.

use crate::metrics::Metrics;
use crate::workplace::Workplace;

#[test]
fn without_arguments_a_small_model_learns() {
    let place = Workplace::new();
    let outcome = place.trainer("").succeeds();
    let summary = &outcome.stdout;
    for part in [
        "200 steps of tiny (f32)",
        "tokens/s",
        "planned",
        "measured",
        "optimizer_state",
        "peak in backward",
        "checkpoint runs/tiny-",
        "run directory runs/tiny-",
    ] {
        assert!(summary.contains(part), "no {part:?}: {outcome:?}");
    }
    let (_, folder) = summary.split_once("run directory ").unwrap();
    let metrics = Metrics::read(&place, folder.trim_end());
    let losses = metrics.losses();
    assert_eq!((losses.len(), metrics.end_reason()), (200, "done"));
    // ln 256 = 5.55 is guessing; the bytes of English by their frequency alone give 3.
    assert!((5.3..5.8).contains(&losses[0]), "{}", losses[0]);
    assert!(losses[199] < 2.0, "{}", losses[199]);
}

#[test]
fn recompute_without_a_command_changes_memory_alone() {
    let place = Workplace::new();
    let run = |out: &str, more: &str| {
        let outcome = place
            .trainer(&format!("{more} --steps 3 --out {out}"))
            .succeeds();
        (Metrics::read(&place, out), outcome.stdout)
    };
    let (none, _) = run("none", "");
    let (core_attn, summary) = run("core_attn", "--recompute core_attn");
    assert!(summary.contains("recompute core_attn"), "{summary}");
    for (step, other) in core_attn.steps().into_iter().zip(none.steps()) {
        assert!(step["peak_bytes"].as_u64() < other["peak_bytes"].as_u64());
        let counts = step["replayed"].as_object().unwrap();
        assert!(!counts.is_empty());
        assert!(counts.values().all(|count| count.as_u64().unwrap() > 0));
        assert_eq!(other["replayed"], serde_json::json!({}));
        assert_eq!(step["loss"], other["loss"]);
        assert_eq!(step["grad_norm"], other["grad_norm"]);
    }
}
