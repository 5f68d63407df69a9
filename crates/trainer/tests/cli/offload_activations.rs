//! `--offload-activations` through the binary.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::Value;

const MODEL: &str = "--config small.toml --set model.layers=4 --accum 3 --device cpu";

/// The plan and the step lines of a run.
fn run(place: &Workplace, arguments: &str, out: &str) -> (Value, Vec<Value>) {
    let arguments = format!("{MODEL} --steps 3 --out {out} {arguments}");
    place.trainer(&arguments).succeeds();
    let plan = serde_json::from_str(&place.text(&format!("{out}/plan.json"))).unwrap();
    let metrics = Metrics::read(place, out);
    let steps = metrics.steps().into_iter().cloned().collect();
    (plan, steps)
}

#[test]
fn losses_are_the_same_and_every_step_is_as_planned() {
    let place = Workplace::new();
    let numbers = |steps: &[Value]| -> Vec<_> {
        let of = |step: &Value| (step["loss"].clone(), step["grad_norm"].clone());
        steps.iter().map(of).collect()
    };
    let (keeps, expected) = run(&place, "", "keeps");
    assert_eq!(keeps["host_pinned_bytes"], 0);
    for (number, arguments) in [
        "--offload-activations mlp,block_input",
        "--offload-activations core_attn,attn_value --recompute mlp",
        "--set offload.activations=block_input --recompute full",
    ]
    .into_iter()
    .enumerate()
    {
        let (plan, steps) = run(&place, arguments, &format!("offloads-{number}"));
        assert_eq!(numbers(&steps), numbers(&expected), "{arguments}");
        for step in &steps {
            for field in [
                "peak_bytes",
                "peak_by_category",
                "phase_peak_bytes",
                "slab_bytes",
                "host_pinned_bytes",
                "h2d_bytes",
                "d2h_bytes",
            ] {
                assert_eq!(step[field], plan[field], "{arguments}: {field}");
            }
        }
        let bytes = |plan: &Value, field: &str| plan[field].as_u64().unwrap();
        assert!(bytes(&plan, "peak_bytes") < bytes(&keeps, "peak_bytes"));
        let pinned = bytes(&plan, "host_pinned_bytes");
        assert!(pinned > 0);
        for field in ["h2d_bytes", "d2h_bytes"] {
            let more = bytes(&plan, field) - bytes(&keeps, field);
            assert!((pinned..=3 * pinned).contains(&more), "{field} {more}");
        }
        let activations = plan["activations"].as_array().unwrap();
        let offloaded = activations.iter().filter(|one| one["action"] == "offload");
        let sum: u64 = offloaded.map(|one| one["bytes"].as_u64().unwrap()).sum();
        assert_eq!(sum, pinned, "{arguments}");
    }
}

#[test]
fn the_table_shows_what_is_on_the_host() {
    let place = Workplace::new();
    let plan = format!("plan {MODEL} --offload-activations mlp");
    let table = place.trainer(&plan).succeeds().stdout;
    for part in [
        " for what is offloaded; a step moves ",
        "on the host",
        "--offload-activations",
        "note: ",
        "mlp of all layers but the last",
    ] {
        assert!(table.contains(part), "no {part:?} in\n{table}");
    }
    let single = "--set model.layers=1 --offload-activations mlp";
    let table = place.trainer(&format!("plan {MODEL} {single}")).succeeds();
    assert!(table.stdout.contains("note: nothing is offloaded"));
    let table = place.trainer(&format!("plan {MODEL}")).succeeds().stdout;
    assert!(!table.contains("on the host") && !table.contains("is offloaded"));
}

#[test]
fn contradictions_say_what_to_write() {
    let place = Workplace::new();
    for (arguments, words) in [
        (
            "mlp --recompute mlp",
            ["`mlp` cannot be offloaded", "leave `mlp` out"],
        ),
        (
            "mlp --recompute mlp_act",
            ["`mlp_act` is recomputed", "leave `mlp` out"],
        ),
        (
            "block_input --recompute full:uniform:2",
            ["`block_input`", "in layer 1"],
        ),
        (
            "qkv --set recompute.layers={\"2-\"=\"full\"}",
            ["`qkv`", "in layer 2"],
        ),
        (
            "core_attn --recompute-granularity selective",
            ["`core_attn` cannot", "leave `core_attn` out"],
        ),
        ("mpl", ["did you mean `mlp`?", "block_input, layernorm"]),
        ("mlp,mlp", ["`mlp` is given twice", "name it once"]),
        ("mlp,none", ["stands alone", "comma list"]),
    ] {
        for command in ["train", "plan"] {
            let line = format!("{command} {MODEL} --offload-activations {arguments}");
            place.trainer(&line).fails(2, &words);
        }
    }
}

/// Under a limit, every fix of a run that offloads is one that its command line takes.
#[test]
fn fixes_go_with_what_is_offloaded() {
    let place = Workplace::new();
    let offloads = "--offload-activations mlp";
    let (plan, _) = run(&place, offloads, "fits");
    let limit = plan["peak_bytes"].as_u64().unwrap() - 256;
    let limited = format!("{MODEL} --steps 1 {offloads} --memory-limit {limit}");
    let refused = place.trainer(&format!("{limited} --out refused"));
    refused.fails(3, &["out of memory"]);
    let report: Value = serde_json::from_str(&place.text("refused/oom.json")).unwrap();
    let fixes = report["fixes"].as_array().unwrap();
    let ends_offload = |fix: &&Value| fix.to_string().contains("offload.activations=none");
    assert!(fixes.iter().any(|fix| ends_offload(&fix)));
    assert!(fixes.iter().any(|fix| !ends_offload(&fix)));
    for (number, fix) in fixes.iter().enumerate() {
        let set = fix["set"].as_array().unwrap().iter();
        let set: String = set
            .map(|one| format!(" --set {}", one.as_str().unwrap()))
            .collect();
        let line = format!("{limited} --out fixed-{number}{set}");
        place.trainer(&line).succeeds();
        let steps = Metrics::read(&place, &format!("fixed-{number}"));
        assert_eq!(steps.steps()[0]["peak_bytes"], fix["peak_bytes"], "{set}");
    }
}
