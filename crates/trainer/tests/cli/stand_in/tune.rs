//! `trainer tune`: what is measured once is what later runs take, and say.

use super::{agree, figures, on_gpu};
use crate::metrics::Metrics;
use crate::workplace::{Outcome, Workplace};
use serde_json::Value;

/// Algorithm 2 of each product is the fastest; 3 is as fast, and named later.
const FAST_THIRD: (&str, &str) = ("STAND_IN_ALGORITHM_US", "30,20,10,10");

const RUN: &str = "--config small.toml --device cuda --dtype f32";

#[track_caller]
fn tune(place: &Workplace, flags: &str, settings: &[(&str, &str)]) -> Value {
    let tuned = on_gpu(place, &format!("tune {RUN} {flags} --json"), settings).succeeds();
    serde_json::from_str(&tuned.stdout).unwrap()
}

fn train(place: &Workplace, flags: &str, out: &str) -> Outcome {
    on_gpu(place, &format!("{RUN} {flags} --out {out}"), &[])
}

/// Figures of a run, and the algorithms that it wrote down.
#[track_caller]
fn trained(place: &Workplace, flags: &str, out: &str) -> (Vec<f64>, String) {
    train(place, flags, out).succeeds();
    let metrics = Metrics::read(place, out);
    let written = |record: &Value| record["algorithms"].as_str().unwrap().to_owned();
    let plan = super::plan(place, out);
    assert_eq!(written(run_record(&metrics)), written(&plan));
    (figures(&metrics), written(run_record(&metrics)))
}

#[track_caller]
fn run_record(metrics: &Metrics) -> &Value {
    metrics.of_kind("run").next().unwrap()
}

/// The file that is kept by default.
const KEPT: &str = "caches/trainer/algorithms/stand-in-gpu-120904.json";

#[test]
fn the_fastest_is_kept_and_taken() {
    let place = Workplace::new();
    let saved = |out: &str| std::fs::read(place.path(&format!("{out}/model.safetensors"))).unwrap();
    let (plain, heuristic) = trained(&place, "--save-final plain-model", "plain");
    assert_eq!(heuristic, "heuristic");

    let tuned = tune(&place, "", &[FAST_THIRD]);
    let products = tuned["products"].as_array().unwrap();
    assert!(products.len() >= 8, "{tuned}");
    for product in products {
        let times = ["microseconds", "first_microseconds"].map(|name| product[name].as_f64());
        assert_eq!(times, [Some(10.0), Some(30.0)], "{product}");
        assert_eq!(
            (&product["taken"], &product["measured"]),
            (&2.into(), &4.into())
        );
    }
    assert!(tuned["file"].as_str().unwrap().ends_with(KEPT), "{tuned}");
    let kept: Value = serde_json::from_str(&place.text(KEPT)).unwrap();
    assert_eq!(kept["products"].as_array().unwrap().len(), products.len());

    let (fast, algorithms) = trained(&place, "--save-final fast-model", "fast");
    assert!(
        algorithms.starts_with("stand-in-gpu-120904.json "),
        "{algorithms}"
    );
    // Figures of a few steps may be the same after rounding.
    assert!(
        saved("fast-model") != saved("plain-model"),
        "sums in another order"
    );
    agree(&fast, &plain, 1e-4);
    // The same file, the same bits, whatever is recomputed.
    let again = trained(&place, "--recompute full --save-final again-model", "again");
    assert_eq!(again, (fast, algorithms));
    assert!(saved("again-model") == saved("fast-model"));
    let without = "--set hardware.algorithms=heuristic";
    assert_eq!(trained(&place, without, "without"), (plain, heuristic));
}

/// Forward products in FP8 are timed with and without fast accumulation, whichever the run has.
#[test]
fn both_ways_to_add_up_in_fp8_are_timed() {
    let place = Workplace::new();
    let rows = |flags: &str| {
        let run =
            format!("tune --config small.toml --device cuda --dtype bf16 --fp8 tensor {flags}");
        let tuned = on_gpu(&place, &format!("{run} --json"), &[FAST_THIRD]).succeeds();
        let tuned: Value = serde_json::from_str(&tuned.stdout).unwrap();
        let rows = tuned["products"].as_array().unwrap().clone();
        let mut fast = rows.clone();
        fast.retain(|row| row["fast_accumulation"] == true);
        [rows, fast].map(|rows| rows.len())
    };
    let [all, fast] = rows("");
    assert!(fast >= 3 && all > 2 * fast, "{fast} of {all}");
    assert_eq!(rows("--set fp8.fast_accumulation=true"), [all, fast]);
}

/// Zeros run faster than data. The rehearsal of a run, which times nothing, has them.
#[test]
fn products_are_timed_on_data() {
    let place = Workplace::new();
    let operands = |command: &str| {
        let file = place.path("operands");
        std::fs::write(&file, "").unwrap();
        let noted = [("STAND_IN_OPERANDS", file.to_str().unwrap()), FAST_THIRD];
        on_gpu(&place, command, &noted).succeeds();
        let noted = place.text("operands");
        ["zeros", "data"].map(|what| noted.lines().filter(|line| *line == what).count())
    };
    let [zeros, data] = operands(&format!("tune {RUN}"));
    assert_eq!(zeros, 0);
    assert!(data > 100, "{data}");
    let [zeros, data] = operands(&format!("{RUN} --out run"));
    assert!(zeros > 0 && data > 0, "{zeros} {data}");
}

/// What is measured for another run is added, and changes nothing of this one's record.
#[test]
fn files_grow() {
    let place = Workplace::new();
    let file = "--set hardware.algorithms=mine.json";
    let first = tune(&place, "--out mine.json", &[FAST_THIRD]);
    let taken = trained(&place, file, "first");
    let count = || -> usize {
        let kept: Value = serde_json::from_str(&place.text("mine.json")).unwrap();
        kept["products"].as_array().unwrap().len()
    };
    assert_eq!(count(), first["products"].as_array().unwrap().len());
    let before = count();
    tune(&place, "--out mine.json --seq 24", &[FAST_THIRD]);
    assert!(count() > before);
    assert_eq!(trained(&place, file, "second"), taken);
    // A file of one's own is not what other runs look for.
    assert_eq!(trained(&place, "", "other").1, "heuristic");
    // Products that it does not know take the heuristic's first choice: some of a smaller batch, all of another type.
    let (_, some) = trained(&place, &format!("{file} --micro-batch 1"), "some");
    assert!(some.starts_with("mine.json ") && some != taken.1, "{some}");
    let other_type = format!("{file} --set train.dtype=bf16");
    assert_eq!(trained(&place, &other_type, "none").1, "heuristic");
}

/// No more is measured than there is, and less than one in a hundred is noise.
#[test]
fn the_heuristic_keeps_its_word_where_nothing_is_faster() {
    let place = Workplace::new();
    for (settings, measured) in [
        (
            [
                ("STAND_IN_ALGORITHM_US", "100,99.5"),
                ("STAND_IN_ALGORITHMS", "20"),
            ],
            16,
        ),
        (
            [
                ("STAND_IN_ALGORITHM_US", "100"),
                ("STAND_IN_ALGORITHMS", "1"),
            ],
            1,
        ),
    ] {
        let tuned = tune(&place, "", &settings);
        for product in tuned["products"].as_array().unwrap() {
            assert_eq!(product["taken"], 0, "{product}");
            assert_eq!(product["measured"], measured, "{product}");
        }
    }
    let (plain, _) = trained(&place, "--set hardware.algorithms=heuristic", "plain");
    let (kept, algorithms) = trained(&place, "", "kept");
    assert_eq!(kept, plain);
    assert_ne!(algorithms, "heuristic");
}

/// A file that is named must be right; one that is merely kept is passed over, and made anew.
#[test]
fn files_that_are_none_of_this_gpu_are_told() {
    let place = Workplace::new();
    tune(&place, "", &[FAST_THIRD]);
    let whole = place.text(KEPT);
    for (name, text, words) in [
        ("truncated", whole[..whole.len() / 2].to_string(), "EOF"),
        ("empty", String::new(), "EOF"),
        (
            "another GPU's",
            whole.replace("Stand-in GPU", "NVIDIA H100"),
            "measured on NVIDIA H100 (9.0), and this is Stand-in GPU",
        ),
        (
            "another version's",
            whole.replace("120904", "120905"),
            "those of cuBLASLt 120905, and cuBLASLt 120904 was loaded",
        ),
        (
            "another form's",
            whole.replace("\"format\": 2", "\"format\": 3"),
            "in form 3",
        ),
        (
            "an earlier form's",
            whole.replace("\"format\": 2", "\"format\": 1"),
            "in form 1, which was timed on zeros",
        ),
    ] {
        place.file(KEPT, &text);
        place.file("named.json", &text);
        let out = name.replace([' ', '\''], "-");
        let named = train(&place, "--set hardware.algorithms=named.json", &out);
        named.fails(4, &["named.json", words, "`trainer tune`"]);
        assert!(!place.path(&out).exists(), "{name}");
        let onto = on_gpu(&place, &format!("tune {RUN} --out named.json"), &[]);
        onto.fails(4, &["named.json", words]);

        let kept = train(&place, "", &out).succeeds();
        let warned = kept.stderr.contains(words) && kept.stderr.contains("WARN");
        assert!(warned, "{name}: {kept:?}");
        let metrics = Metrics::read(&place, &out);
        assert_eq!(run_record(&metrics)["algorithms"], "heuristic", "{name}");
        tune(&place, "", &[FAST_THIRD]);
        assert_eq!(place.text(KEPT), whole, "{name}");
    }
    let missing = train(&place, "--set hardware.algorithms=nowhere.json", "missing");
    missing.fails(4, &["nowhere.json", "no such file"]);
}

/// An algorithm that the library does not take after all.
#[test]
fn what_the_library_refuses_is_its_own_choice_and_said() {
    let place = Workplace::new();
    tune(&place, "", &[FAST_THIRD]);
    let fewer = [("STAND_IN_ALGORITHMS", "2")];
    let run = on_gpu(&place, &format!("{RUN} --out fewer"), &fewer).succeeds();
    let words = "does not take the algorithm that was measured for";
    assert!(run.stderr.contains(words), "{run:?}");
    let plain = trained(&place, "--set hardware.algorithms=heuristic", "plain");
    assert_eq!(figures(&Metrics::read(&place, "fewer")), plain.0);
}

/// Other algorithms are other bits: a run does not go on with them unless that is meant.
#[test]
fn a_run_goes_on_with_the_algorithms_that_it_began_with() {
    let place = Workplace::new();
    let whole = trained(&place, "", "whole").0;
    train(&place, "--save-every 1 --steps 2", "run").succeeds();
    tune(&place, "", &[FAST_THIRD]);
    let go_on = |flags: &str| {
        let run = format!("--resume run --steps 4 {flags}");
        on_gpu(&place, &run, &[])
    };
    let words = [
        "algorithms of matrix products: heuristic before, stand-in-gpu-120904.json ",
        "--allow-change",
    ];
    go_on("").fails(2, &words);
    go_on("--set hardware.algorithms=heuristic").succeeds();
    let metrics = Metrics::read(&place, "run");
    assert_eq!(figures(&metrics), whole);
    // The run has written down that it does without.
    on_gpu(&place, "--resume run --steps 5", &[]).succeeds();
    let file = place.path(KEPT);
    let changed = format!(
        "--allow-change --set hardware.algorithms={}",
        file.display()
    );
    let changed = format!("--resume run --steps 6 {changed}");
    on_gpu(&place, &changed, &[]).succeeds();
    let written = place.text("run/metrics.jsonl");
    assert!(written.contains("algorithms of matrix products: heuristic before"));
    // And that it has changed.
    let back = "--resume run --steps 7 --set hardware.algorithms=heuristic";
    let words = ["algorithms of matrix products: stand-in", "heuristic now"];
    on_gpu(&place, back, &[]).fails(2, &words);
}

#[test]
fn products_are_told_in_a_table() {
    let place = Workplace::new();
    let run = format!("tune {RUN}");
    let told = on_gpu(&place, &run, &[FAST_THIRD]).succeeds().stdout;
    for words in [
        "Stand-in GPU",
        "cuBLASLt 120904",
        "heuristic's us",
        "f32 to f32",
        "30.0",
        KEPT,
    ] {
        assert!(told.contains(words), "{words}: {told}");
    }
}

/// Products of weights in bf16 with gradients in f32, of a rank and of an evaluation are those of their runs.
#[test]
fn every_product_of_a_run_is_known() {
    let place = Workplace::new();
    let run = "--config small.toml --device cuda --dtype bf16 --set collectives.zero=1 --accum 3 --steps 1 \
               --eval-every 1 --eval-data held-out.txt --eval-micro-batch 1";
    place.file(
        "held-out.txt",
        "what is written here is evaluated on, and no more ".repeat(4),
    );
    on_gpu(&place, &format!("tune {run}"), &[FAST_THIRD]).succeeds();
    let debug = [("RUST_LOG", "debug")];
    let trained = on_gpu(&place, &format!("{run} --out run"), &debug).succeeds();
    // For the name of what is taken and for the rehearsal alike.
    let listed = trained.stderr.matches("listed a step").count();
    assert_eq!(listed, 1, "{trained:?}");
    let line = trained
        .stderr
        .lines()
        .find(|line| line.contains("that was measured"));
    let line = line.unwrap_or_else(|| panic!("{trained:?}"));
    let numbers: Vec<usize> = line
        .split(' ')
        .filter_map(|word| word.parse().ok())
        .collect();
    let [tuned, of] = numbers[..] else {
        panic!("{line}")
    };
    assert_eq!(tuned, of, "{line}");
}
