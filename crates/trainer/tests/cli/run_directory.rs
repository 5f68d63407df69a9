//! What a run writes, and how its files agree.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use crate::{batches::batch_file, references::MODES};
use serde_json::Value;

/// The fields that a plan and every step line share.
const SHARED: [&str; 7] = [
    "peak_bytes",
    "peak_by_category",
    "phase_peak_bytes",
    "peak_phase",
    "peak_layer",
    "slab_bytes",
    "host_pinned_bytes",
];

#[track_caller]
fn assert_steps_are_planned(plan: &Value, metrics: &Metrics, what: &str) {
    assert!(!metrics.steps().is_empty(), "{what}");
    for step in metrics.steps() {
        for field in SHARED {
            assert!(plan.get(field).is_some(), "{what}: {field}");
            assert_eq!(plan[field], step[field], "{what}: {field}");
        }
        assert_eq!(plan["peak_bytes"], step["planned_peak_bytes"], "{what}");
    }
}

/// A run writes the plan that the command prints, but for what other settings would need.
#[track_caller]
fn assert_is_planned(printed: &str, written: &str) {
    let mut printed: Value = serde_json::from_str(printed).unwrap();
    for name in ["strategies", "effects", "operations"] {
        let others = printed.as_object_mut().unwrap().remove(name).unwrap();
        assert!(!others.as_array().unwrap().is_empty(), "{name}");
    }
    assert_eq!(printed, serde_json::from_str::<Value>(written).unwrap());
}

#[test]
fn records_stand_in_order_and_are_complete() {
    let place = Workplace::new();
    place
        .trainer("--config small.toml --set hardware.peak_tflops=1 --out run")
        .succeeds();
    let metrics = Metrics::read(&place, "run");
    let kinds: Vec<&Value> = metrics.0.iter().map(|record| &record["kind"]).collect();
    assert_eq!(kinds, ["run", "step", "step", "step", "step", "end"]);
    let run = &metrics.0[0];
    assert_eq!(
        (&run["device"], &run["dtype"]),
        (&"cpu".into(), &"f32".into())
    );
    assert_eq!(run["model"], "small");
    for field in [
        "parameters",
        "flops_per_token",
        "granularity_bytes",
        "untracked_host_bytes_max",
    ] {
        assert!(run[field].as_u64().unwrap() > 0, "{field}");
    }
    for (index, step) in metrics.steps().into_iter().enumerate() {
        assert_eq!(step["step"], index + 1);
        assert_eq!(step["tokens"], 2 * 2 * 32);
        assert_eq!(step["finite"], true);
        assert_eq!(step["lr"], 0.001);
        for field in [
            "step_ms",
            "tokens_per_s",
            "tflops",
            "mfu",
            "loss",
            "grad_norm",
        ] {
            assert!(step[field].as_f64().unwrap() > 0.0, "{field}");
        }
        let by_category = step["peak_by_category"].as_object().unwrap();
        let sum: u64 = by_category
            .values()
            .map(|bytes| bytes.as_u64().unwrap())
            .sum();
        assert_eq!(step["peak_bytes"], sum);
        let phases = step["phase_peak_bytes"].as_object().unwrap();
        let most = phases.values().map(|bytes| bytes.as_u64().unwrap()).max();
        assert_eq!(step["peak_bytes"].as_u64(), most);
    }
    assert_eq!(metrics.end_reason(), "done");
    assert!(metrics.0[5]["max_rss_bytes"].as_u64().unwrap() > 1 << 20);
}

/// In every mode, the plan of the run, the plan of the command and the measurement are one.
#[test]
fn what_is_planned_is_what_happens() {
    let place = Workplace::new();
    for dtype in ["f32", "bf16"] {
        for mode in MODES {
            let settings =
                format!("--config small.toml --device cpu --dtype {dtype} --recompute {mode}");
            let out = format!("{dtype}-{mode}");
            place
                .trainer(&format!("train {settings} --out {out}"))
                .succeeds();
            let printed = place.trainer(&format!("plan --json {settings}")).succeeds();
            let written = place.text(&format!("{out}/plan.json"));
            assert_is_planned(&printed.stdout, &written);
            let plan = serde_json::from_str(&written).unwrap();
            assert_steps_are_planned(&plan, &Metrics::read(&place, &out), &settings);
        }
    }
}

/// A batch file brings its own sequence length, for the plan as for the run.
#[test]
fn the_plan_of_a_batch_file_has_its_sequence_length() {
    let place = Workplace::new();
    place.file("rows.safetensors", batch_file(&[1; 96], &[2; 96], 12));
    let settings = "--config small.toml --device cpu --data rows.safetensors";
    place.trainer(&format!("{settings} --out run")).succeeds();
    let printed = place.trainer(&format!("plan --json {settings}")).succeeds();
    assert_is_planned(&printed.stdout, &place.text("run/plan.json"));
    let plan = serde_json::from_str(&printed.stdout).unwrap();
    assert_steps_are_planned(&plan, &Metrics::read(&place, "run"), settings);
    let other = place.trainer("plan --json --device cpu --config small.toml");
    assert_ne!(other.succeeds().stdout, printed.stdout);
}

/// Trained again from its run directory, a run is the same; so is its plan, with nothing said about the device.
#[test]
fn the_written_configuration_repeats_the_run() {
    let place = Workplace::new();
    place.file("rows.safetensors", batch_file(&[1; 96], &[2; 96], 12));
    let cases = [
        ("text", "--recompute mlp --set lr.schedule=cosine --seed 7"),
        ("rows", "--data rows.safetensors --dtype bf16"),
    ];
    for (out, settings) in cases {
        place
            .trainer(&format!("--config small.toml {settings} --out {out}"))
            .succeeds();
        let again = format!("{out}-again");
        place
            .trainer(&format!("--config {out}/config.toml --out {again}"))
            .succeeds();
        let (first, second) = (Metrics::read(&place, out), Metrics::read(&place, &again));
        assert_eq!(first.untimed_steps(), second.untimed_steps(), "{out}");
        let config = |out: &str| place.text(&format!("{out}/config.toml"));
        assert_eq!(config(out), config(&again), "{out}");
        let plan = place.trainer(&format!("plan --json --config {out}/config.toml"));
        let written = place.text(&format!("{out}/plan.json"));
        assert_is_planned(&plan.succeeds().stdout, &written);
    }
}

#[test]
fn without_out_runs_are_collected_in_a_folder() {
    let place = Workplace::new();
    let command = "--config small.toml --steps 1";
    for _ in 0..2 {
        let outcome = place.trainer(command).succeeds();
        let (_, named) = outcome.stdout.split_once("run directory ").unwrap();
        assert!(named.starts_with("runs/small-"), "{named}");
        assert_eq!(Metrics::read(&place, named.trim_end()).end_reason(), "done");
    }
    let runs = std::fs::read_dir(place.path("runs")).unwrap();
    assert_eq!(runs.count(), 2, "runs of one second do not meet");
}

#[test]
fn an_empty_folder_is_used_and_nothing_else_is_written() {
    let place = Workplace::new();
    place.folder("run");
    place
        .trainer("--config small.toml --steps 1 --out run")
        .succeeds();
    let names = |folder: &str| {
        let entries = std::fs::read_dir(place.path(folder)).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let files = [
        ".lock",
        "config.toml",
        "metrics.jsonl",
        "plan.json",
        "report.html",
    ];
    assert_eq!(names("run"), files);
    assert_eq!(names(""), ["plain.toml", "run", "small.toml"]);
}

/// Documents of many lengths, a row each: micro-batches are as long as their longest.
fn documents(place: &Workplace) {
    let text = |number: usize| "ab ".repeat(3 + number * 37 % 80);
    let lines = (0..120).map(|number| format!("{{\"text\": \"{}\"}}\n", text(number)));
    place.file("texts.jsonl", lines.collect::<String>());
    let prepare = "prepare texts.jsonl --out data --tokenizer bytes --validation 0.1";
    place.trainer(prepare).succeeds();
}

/// Each step is planned by the lengths of its own micro-batches, an evaluation by its own rows and lengths, and the table at the
/// end has the run's peak, which is not the last step's.
#[test]
fn steps_of_many_lengths_are_planned_and_the_end_has_the_largest() {
    let place = Workplace::new();
    documents(&place);
    let flags = "--config small.toml --device cpu --data data --packing pad --seq 256 --steps 5 --eval-every 5 --out run";
    let ended = place.trainer(flags).succeeds();
    let metrics = Metrics::read(&place, "run");
    let peaks = |records: Vec<&Value>| -> Vec<u64> {
        let peak = |record: &Value| {
            assert_eq!(
                record["peak_bytes"], record["planned_peak_bytes"],
                "{record}"
            );
            record["peak_bytes"].as_u64().unwrap()
        };
        records.into_iter().map(peak).collect()
    };
    assert_eq!(peaks(metrics.of_kind("eval").collect()).len(), 1);
    let steps = peaks(metrics.steps());
    let (last, most) = (*steps.last().unwrap(), *steps.iter().max().unwrap());
    assert!(last < most, "the last step is not the largest: {steps:?}");
    let plan: Value = serde_json::from_str(&place.text("run/plan.json")).unwrap();
    let planned = plan["peak_bytes"].as_u64().unwrap();
    assert!(most <= planned, "{most} {planned}");
    let mut lines = ended.stdout.lines();
    let table = lines.find(|line| line.starts_with("  peak ")).unwrap();
    let difference = format!(" {} B", most as i64 - planned as i64);
    assert!(table.ends_with(&difference), "{table}, not {difference}");
}
