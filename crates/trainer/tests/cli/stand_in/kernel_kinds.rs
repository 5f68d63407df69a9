//! Kernels that Hopper alone runs: which GPUs take them, what a trial says against them, and what follows.

use super::{IDLE, figures, on_gpu, plan};
use crate::metrics::Metrics;
use crate::workplace::{Outcome, Workplace};
use serde_json::Value;
use std::path::PathBuf;

/// A mixture of 8 experts, each with 32 rows at most.
const RUN: &str = "--config tiny-moe --device cuda --set train.dtype=bf16 --set model.layers=1 --set lr.schedule=constant --seq 16 \
                   --micro-batch 2 --accum 1 --steps 2 --save-every 2";

const AMPERE: (&str, &str) = ("STAND_IN_CAPABILITY", "8.0");

fn train(place: &Workplace, flags: &str, settings: &[(&str, &str)]) -> Outcome {
    on_gpu(place, &format!("{RUN} {flags}"), settings)
}

/// The first line of a run.
fn record(place: &Workplace, out: &str) -> Value {
    Metrics::read(place, out)
        .of_kind("run")
        .next()
        .unwrap()
        .clone()
}

/// The file of verdicts.
fn kept(place: &Workplace) -> PathBuf {
    let folder = std::fs::read_dir(place.path("caches/trainer/kernels")).unwrap();
    let files: Vec<PathBuf> = folder.map(|entry| entry.unwrap().path()).collect();
    let [file] = files.as_slice() else {
        panic!("{files:?}")
    };
    file.clone()
}

/// Peaks are as planned, and the plan is the same for every kind.
#[test]
fn a_gpu_takes_what_was_made_for_it() {
    let place = Workplace::new();
    let mut plans = Vec::new();
    for (out, set, capability, kind) in [
        ("hopper", "auto", "9.0", "sm90"),
        ("as-elsewhere", "sm80", "9.0", "sm80"),
        ("named", "sm90", "9.0", "sm90"),
        ("ampere", "auto", "8.0", "sm80"),
        ("blackwell", "auto", "10.0", "sm80"),
    ] {
        let flags = format!("--out {out} --set experts.kernels={set}");
        train(&place, &flags, &[("STAND_IN_CAPABILITY", capability)]).succeeds();
        let record = record(&place, out);
        assert_eq!(record["experts_kernels"], kind, "{out}");
        assert_eq!(record["attention_kernels"], "sm80", "{out}");
        assert_eq!(record["kernels_given_up"], Value::Null, "{out}");
        for step in Metrics::read(&place, out).steps() {
            assert_eq!(step["peak_bytes"], step["planned_peak_bytes"], "{out}");
        }
        plans.push(plan(&place, out));
    }
    assert!(plans.iter().all(|plan| *plan == plans[0]));
    let named = train(&place, "--set experts.kernels=sm90", &[AMPERE]);
    named.fails(
        2,
        &[
            "experts.kernels is sm90",
            "Stand-in GPU has 8.0",
            "leave it at auto",
        ],
    );
    let f32 = "--set train.dtype=f32 --set experts.kernels=sm90 --out f32";
    let told = train(&place, f32, &[]).succeeds();
    let words = "experts.kernels has no effect on the run: it is for experts in bf16";
    assert!(told.stderr.contains(words), "{told:?}");
    assert_eq!(record(&place, "f32")["experts_kernels"], "sm80");
}

/// A run goes on with the other kernels, in the same memory and with their bits, and says why; one that names the kernels ends. The
/// verdict is kept: later runs try nothing.
fn given_up(fault: &str, verdict: &str, words: &str) {
    let place = Workplace::new();
    let faulty = [("STAND_IN_SM90", fault)];
    train(&place, "--set experts.kernels=sm80 --out other", &faulty).succeeds();
    let told = train(&place, "--out run", &faulty).succeeds();
    let warned = told.stderr.lines().find(|line| line.contains(words));
    assert!(warned.is_some_and(|line| line.contains("WARN")), "{told:?}");
    let run = record(&place, "run");
    assert_eq!(run["experts_kernels"], "sm80", "{run}");
    let given_up = run["kernels_given_up"].as_str().unwrap();
    assert!(given_up.contains(words), "{given_up}");
    assert_eq!(plan(&place, "run"), plan(&place, "other"), "{fault}");
    let of = |out| figures(&Metrics::read(&place, out));
    assert_eq!(of("run"), of("other"), "{fault}");

    let file = kept(&place);
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(
        text.contains(&format!("\"verdict\": \"{verdict}\"")),
        "{text}"
    );
    let later = train(&place, "--out later", &[]).succeeds();
    assert!(later.stderr.contains(words), "{later:?}");
    assert_eq!(record(&place, "later")["experts_kernels"], "sm80");
    let named = train(&place, "--set experts.kernels=sm90 --out named", &[]);
    named.fails(
        5,
        &["experts.kernels is sm90, and", words, "at auto or sm80"],
    );
    assert!(!place.path("named").exists());

    std::fs::remove_file(file).unwrap();
    train(&place, "--out anew", &[]).succeeds();
    assert_eq!(record(&place, "anew")["experts_kernels"], "sm90");
}

#[test]
fn kernels_that_are_wrong_are_given_up() {
    given_up("wrong", "wrong", "were wrong in a trial: an element is ");
}

#[test]
fn kernels_whose_results_vary_are_given_up() {
    given_up("varies", "two_results", "had two results in a trial: ");
}

#[test]
fn kernels_that_fault_are_given_up() {
    given_up("faults", "faulted", "failed in a trial: ");
}

#[test]
fn kernels_that_hang_are_given_up() {
    given_up("hangs", "hung", "were not done with a trial after 20 s");
}

/// It is on a run's widths alone.
#[test]
fn a_verdict_is_kept() {
    let place = Workplace::new();
    train(&place, "--out first", &[]).succeeds();
    let faulty = [("STAND_IN_SM90", "wrong")];
    let wider = "--set model.experts.ffn=48 --out wider";
    for (run, out, kind) in [("--out second", "second", "sm90"), (wider, "wider", "sm80")] {
        train(&place, run, &faulty).succeeds();
        assert_eq!(record(&place, out)["experts_kernels"], kind);
    }
}

/// A GPU in compute mode EXCLUSIVE_PROCESS lets in one process at a time: the trial is over before the run comes.
#[test]
fn they_are_tried_before_the_run_opens_the_gpu() {
    let place = Workplace::new();
    let gpu = place.path("gpu");
    let exclusive = [("STAND_IN_EXCLUSIVE", gpu.to_str().unwrap())];
    train(&place, "--out run", &exclusive).succeeds();
    assert_eq!(record(&place, "run")["experts_kernels"], "sm90");
    let held = std::fs::File::open(place.path("gpu0")).unwrap();
    held.lock().unwrap();
    train(&place, "--out held", &exclusive).fails(5, &["CUDA_ERROR_DEVICE_UNAVAILABLE"]);
}

/// Where nothing can be kept, one trial is enough.
#[test]
fn a_run_without_a_folder_for_caches_tries_once() {
    let place = Workplace::new();
    std::fs::write(place.path("caches"), "").unwrap();
    let told = train(&place, "--out run", &[("STAND_IN_SM90", "wrong")]).succeeds();
    assert!(
        told.stderr.contains("is not kept") && !told.stderr.contains("(kept in"),
        "{told:?}"
    );
    assert_eq!(record(&place, "run")["experts_kernels"], "sm80");
}

/// What says nothing about the kernels is no verdict.
#[test]
fn what_was_not_tried_is_tried_again() {
    let place = Workplace::new();
    let told = train(&place, "--out run", &[("STAND_IN_POOLS", "0")]);
    let told = told.fails(5, &["the device cuda cannot be used"]);
    assert!(told.stderr.contains("could not be tried: "), "{told:?}");
    assert!(!place.path("caches").exists());
    train(&place, "--out run", &[]).succeeds();
    assert_eq!(record(&place, "run")["experts_kernels"], "sm90");
}

#[test]
fn the_doctor_tries_them() {
    let place = Workplace::new();
    let doctor = |settings: &[(&str, &str)]| {
        let settings = [&[IDLE], settings].concat();
        let told = on_gpu(&place, "doctor --json --threads 1", &settings).succeeds();
        let machine: Value = serde_json::from_str(&told.stdout).unwrap();
        let gpu = &machine["gpus"][0];
        (
            gpu["experts_kernels"].clone(),
            gpu["experts_kernels_against"].clone(),
        )
    };
    let (verdict, against) = doctor(&[]);
    assert_eq!(
        (&verdict["verdict"], against),
        (&"passed".into(), serde_json::json!([]))
    );
    assert_eq!(doctor(&[AMPERE]).0, Value::Null);
    let wrong = ("STAND_IN_SM90", "wrong");
    train(&place, "--out run", &[wrong]).succeeds();
    let (_, against) = doctor(&[]);
    let of_the_run = against[0].as_str().unwrap();
    assert!(
        of_the_run.starts_with("--hidden=") && of_the_run.contains("they were wrong in a trial"),
        "{against}"
    );
    let (verdict, _) = doctor(&[wrong]);
    assert_eq!(verdict["verdict"], "wrong");
    let reason = verdict["reason"].as_str().unwrap();
    assert!(reason.starts_with("an element is "), "{reason}");
    let told = on_gpu(&place, "doctor --threads 1", &[IDLE, wrong]).succeeds();
    assert!(
        told.stdout
            .contains("sm80: those for 9.0 (sm90) were wrong"),
        "{told:?}"
    );
}

/// What `auto` took is kept to where the GPU has it; another GPU is a warning, another key a change.
#[test]
fn a_run_goes_on_with_its_kernels() {
    let place = Workplace::new();
    train(&place, "--out run", &[]).succeeds();
    let state = place.text("run/checkpoints/step-2/trainer_state.json");
    assert!(state.contains("\"experts_kernels\": \"sm90\""), "{state}");
    let go_on = |flags: &str, settings: &[(&str, &str)]| {
        on_gpu(
            &place,
            &format!("--resume run/checkpoints/step-2 {flags}"),
            settings,
        )
    };
    let change = "experts.kernels: sm90 before, sm80 now";
    let named = "--steps 3 --set experts.kernels=sm80 --out named";
    go_on(named, &[]).fails(2, &[change, "--allow-change"]);
    let same = go_on("--steps 3 --out same", &[]).succeeds();
    assert!(!same.stderr.contains("experts.kernels"), "{same:?}");
    assert_eq!(record(&place, "same")["experts_kernels"], "sm90");
    go_on(&format!("{named} --allow-change"), &[]).succeeds();
    let elsewhere = go_on("--steps 3 --out elsewhere", &[AMPERE]).succeeds();
    let warned = elsewhere.stderr.lines().find(|line| line.contains(change));
    assert!(
        warned.is_some_and(|line| line.contains("WARN")),
        "{elsewhere:?}"
    );
    assert_eq!(record(&place, "elsewhere")["experts_kernels"], "sm80");
    // What went on elsewhere stays with its kernels.
    let back = "--resume elsewhere --steps 4";
    on_gpu(&place, back, &[]).succeeds();
    let lines = Metrics::read(&place, "elsewhere");
    let resumed = lines.of_kind("resume").last().unwrap().clone();
    assert_eq!(resumed["experts_kernels"], "sm80", "{resumed}");
    let state = place.text("elsewhere/checkpoints/step-4/trainer_state.json");
    assert!(state.contains("\"experts_kernels\": \"sm80\""), "{state}");
}
