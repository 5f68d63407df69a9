//! The forms of optimizer states, by their flags and keys.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use safetensors::SafeTensors;
use serde_json::Value;

/// Runs `small.toml`, and checks that it did what was planned.
#[track_caller]
fn run(place: &Workplace, flags: &str, out: &str) -> Metrics {
    place
        .trainer(&format!("--config small.toml {flags} --out {out}"))
        .succeeds();
    let metrics = Metrics::read(place, out);
    assert_eq!((metrics.steps().len(), metrics.end_reason()), (4, "done"));
    for step in metrics.steps() {
        assert_eq!(step["peak_bytes"], step["planned_peak_bytes"], "{flags}");
        assert_eq!(step["finite"], true, "{flags}");
    }
    assert_eq!(metrics.0.last().unwrap()["skipped_steps"], 0);
    metrics
}

/// Of all arenas, as the run's plan has it.
fn bytes_per_parameter(place: &Workplace, out: &str) -> f64 {
    let plan: Value = serde_json::from_str(&place.text(&format!("{out}/plan.json"))).unwrap();
    plan["bytes_per_parameter"].as_f64().unwrap()
}

#[test]
fn every_flag_saves_memory_and_trains() {
    let place = Workplace::new();
    for dtype in ["f32", "bf16"] {
        let plain = run(&place, &format!("--dtype {dtype}"), dtype);
        let flags = [
            "--state-dtype 8bit",
            "--state-dtype bf16",
            "--grad-dtype bf16",
            "--master none",
            "--master bf16-split",
            "--master bf16+8",
            "--optimizer adamw8bit --master none --grad-dtype bf16",
        ];
        for (number, flags) in flags.into_iter().enumerate() {
            let out = format!("{dtype}-{number}");
            let with = run(&place, &format!("--dtype {dtype} {flags}"), &out);
            let [before, after] = [dtype, &out].map(|out| bytes_per_parameter(&place, out));
            // f32 weights are their own master.
            let does_nothing = dtype == "f32" && flags.starts_with("--master");
            let is_exact = does_nothing || flags == "--master bf16-split";
            assert_eq!(after < before, !does_nothing, "{dtype} {flags}");
            assert_eq!(with.losses() == plain.losses(), is_exact, "{dtype} {flags}");
            let near = (with.losses()[3] / plain.losses()[3] - 1.0).abs();
            assert!(near < 0.01, "{dtype} {flags}: {near}");
        }
    }
}

#[test]
fn adamw8bit_is_another_name_of_8_bit_states() {
    let place = Workplace::new();
    let plain = run(&place, "", "plain");
    let by_name = run(&place, "--optimizer adamw8bit", "by-name");
    let by_flag = run(&place, "--state-dtype 8bit", "by-flag");
    let by_key = run(&place, "--set optim.state_dtype=8bit", "by-key");
    assert_ne!(by_name.untimed_steps(), plain.untimed_steps());
    assert_eq!(by_name.untimed_steps(), by_flag.untimed_steps());
    assert_eq!(by_key.untimed_steps(), by_flag.untimed_steps());
    let config = place.text("by-name/config.toml");
    assert!(config.contains("state_dtype = \"8bit\""), "{config}");
}

/// The seed is what stochastic rounding depends on, beside the step: the same run again is the same.
#[test]
fn stochastic_rounding_repeats_itself() {
    let place = Workplace::new();
    let flags = "--dtype bf16 --master none --state-dtype bf16";
    let first = run(&place, flags, "first");
    let again = run(&place, &format!("{flags} --threads 1"), "again");
    assert_eq!(first.untimed_steps(), again.untimed_steps());
}

/// Rows of the table of arenas: name and bytes a parameter.
fn table(text: &str) -> Vec<(String, f64)> {
    let lines = text
        .lines()
        .skip_while(|line| !line.trim_start().starts_with("across steps"));
    let rows = lines.take_while(|line| !line.trim().is_empty());
    let rows: Vec<Vec<&str>> = rows.map(|row| row.split_whitespace().collect()).collect();
    assert!(rows.len() > 1, "{text}");
    let numbers = rows.iter().filter_map(|row| {
        let number = row.last()?.parse().ok()?;
        Some((row[0].to_string(), number))
    });
    numbers.collect()
}

#[test]
fn plan_and_summary_list_the_arenas() {
    let place = Workplace::new();
    let flags =
        "--config small.toml --device cpu --dtype bf16 --state-dtype 8bit --master bf16-split";
    let plan = place.trainer(&format!("plan {flags}")).succeeds();
    let summary = place.trainer(&format!("{flags} --out run")).succeeds();
    let rows = table(&plan.stdout);
    assert_eq!(rows, table(&summary.stdout));
    let names: Vec<&str> = rows.iter().map(|row| row.0.as_str()).collect();
    let expected = [
        "parameters",
        "gradients",
        "remainder",
        "first_moment",
        "first_moment.codes",
        "first_moment.absmax",
        "second_moment",
        "second_moment.codes",
        "second_moment.absmax",
        "total",
    ];
    assert_eq!(names, expected);
    let json: Value = serde_json::from_str(&place.text("run/plan.json")).unwrap();
    let arenas = json["arenas"].as_array().unwrap();
    assert_eq!(arenas.len() + 1, rows.len());
    for (arena, (name, per_parameter)) in arenas.iter().zip(&rows) {
        assert_eq!(arena["name"], name.as_str());
        let expected = arena["bytes_per_parameter"].as_f64().unwrap();
        assert!((per_parameter - expected).abs() <= 0.0006, "{name}");
    }
    let total = json["bytes_per_parameter"].as_f64().unwrap();
    assert!((rows[9].1 - total).abs() <= 0.0006, "{rows:?} {total}");
}

#[test]
fn a_pattern_that_fits_no_tensor_is_refused() {
    let place = Workplace::new();
    let settings =
        "--config small.toml --state-dtype 8bit --set optim.f32_states=[\"*embed*\",\"*nrom*\"]";
    for command in ["train", "plan"] {
        place
            .trainer(&format!("{command} {settings}"))
            .fails(2, &["`*nrom*`", "optim.f32_states", "fits no parameter"]);
    }
    let fitting = settings.replace("nrom", "norm");
    place.trainer(&format!("plan {fitting}")).succeeds();
}

#[test]
fn dumped_gradients_are_f32_whatever_they_are_summed_in() {
    let place = Workplace::new();
    let low_halves = |flags: &str, out: &str| {
        run(&place, &format!("{flags} --dump-gradients 2"), out);
        let file = place.path(&format!("{out}/gradients/step-2.safetensors"));
        let bytes = std::fs::read(file).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut low_halves = 0;
        for (name, tensor) in file.iter() {
            assert_eq!(tensor.dtype(), safetensors::Dtype::F32, "{name}");
            let words = tensor.data().chunks_exact(4);
            let is_zero = words.clone().all(|word| word == [0; 4]);
            assert!(!is_zero, "{name}");
            low_halves += words.filter(|word| word[..2] != [0; 2]).count();
        }
        low_halves
    };
    assert_eq!(low_halves("--dtype bf16 --grad-dtype bf16", "bf16"), 0);
    assert!(low_halves("--dtype bf16 --grad-dtype f32", "f32") > 10_000);
}
