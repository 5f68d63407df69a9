//! Kernels that Hopper alone runs: which GPUs take them, what a trial says against them, and what follows.

use super::{IDLE, figures, on_gpu, plan};
use crate::metrics::Metrics;
use crate::workplace::{Outcome, Workplace};
use serde_json::Value;
use std::path::PathBuf;

/// A mixture of 8 experts, each with 32 rows at most, and heads that Hopper has kernels for.
const RUN: &str = "--config tiny-moe --device cuda --set train.dtype=bf16 --set model.layers=1 --set model.head_dim=64 --attention flash \
                   --set lr.schedule=constant --seq 16 --micro-batch 2 --accum 1 --steps 2 --save-every 2";

/// Operations with kernels of several kinds, by what the names of Hopper's begin with.
const FAMILIES: [(&str, &str); 2] = [("attention", "flash"), ("experts", "grouped")];

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

/// The kinds that a record names, of attention and of experts.
fn kinds(record: &Value) -> [&str; 2] {
    FAMILIES.map(|(family, _)| record[format!("{family}_kernels")].as_str().unwrap())
}

/// Peaks are as planned, and the plan is the same for every kind.
#[test]
fn a_gpu_takes_what_was_made_for_it() {
    let place = Workplace::new();
    let mut plans = Vec::new();
    for (out, set, capability, expected) in [
        ("hopper", ["auto", "auto"], "9.0", ["sm90", "sm90"]),
        ("as-elsewhere", ["sm80", "sm80"], "9.0", ["sm80", "sm80"]),
        ("attention", ["sm90", "sm80"], "9.0", ["sm90", "sm80"]),
        ("experts", ["sm80", "sm90"], "9.0", ["sm80", "sm90"]),
        ("ampere", ["auto", "auto"], "8.0", ["sm80", "sm80"]),
        ("blackwell", ["auto", "auto"], "10.0", ["sm80", "sm80"]),
    ] {
        let [attention, experts] = set;
        let flags = format!(
            "--out {out} --set attention.kernels={attention} --set experts.kernels={experts}"
        );
        train(&place, &flags, &[("STAND_IN_CAPABILITY", capability)]).succeeds();
        let record = record(&place, out);
        assert_eq!(kinds(&record), expected, "{out}");
        assert_eq!(record["kernels_given_up"], Value::Null, "{out}");
        for step in Metrics::read(&place, out).steps() {
            assert_eq!(step["peak_bytes"], step["planned_peak_bytes"], "{out}");
        }
        plans.push((plan(&place, out), figures(&Metrics::read(&place, out))));
    }
    assert!(plans.iter().all(|(plan, _)| *plan == plans[0].0));
    // Emulated, kinds of attention add up in other orders, and those of experts in the same.
    let [both, none, attention, experts] = [0, 1, 2, 3].map(|row: usize| &plans[row].1);
    assert!(both != none && attention == both && experts == none);
    for (family, _) in FAMILIES {
        let key = format!("{family}.kernels");
        let named = train(&place, &format!("--set {key}=sm90"), &[AMPERE]);
        let is_named = format!("{key} is sm90");
        named.fails(2, &[&is_named, "Stand-in GPU has 8.0", "leave it at auto"]);
        let f32 = format!("--set train.dtype=f32 --set {key}=sm90 --out f32-{family}");
        let told = train(&place, &f32, &[]).succeeds();
        let words = format!("{key} has no effect on the run: it is for");
        assert!(told.stderr.contains(&words), "{told:?}");
        assert_eq!(
            kinds(&record(&place, &format!("f32-{family}"))),
            ["sm80"; 2]
        );
    }
}

/// A run goes on with the other kernels of a family, in the same memory and with their bits, and says why; one that names the kernels ends.
/// The verdict is kept: later runs try nothing. It says nothing of the other family.
fn given_up(fault: &str, verdict: &str, words: &str) {
    std::thread::scope(|threads| {
        for (family, kernels) in FAMILIES {
            threads.spawn(move || given_up_of(family, kernels, fault, verdict, words));
        }
    });
}

fn given_up_of(family: &str, kernels: &str, fault: &str, verdict: &str, words: &str) {
    let place = Workplace::new();
    let taken = FAMILIES.map(|(of, _)| if of == family { "sm80" } else { "sm90" });
    let faulty = [("STAND_IN_SM90", fault), ("STAND_IN_SM90_OF", kernels)];
    let other = format!("--set {family}.kernels=sm80 --out other");
    train(&place, &other, &faulty).succeeds();
    let told = train(&place, "--out run", &faulty).succeeds();
    let said = format!("kernels of {family} for 9.0 (sm90) {words}");
    let warned = told.stderr.lines().find(|line| line.contains(&said));
    assert!(warned.is_some_and(|line| line.contains("WARN")), "{told:?}");
    let run = record(&place, "run");
    assert_eq!(kinds(&run), taken, "{run}");
    let given_up = run["kernels_given_up"].as_str().unwrap();
    assert!(given_up.contains(&said), "{given_up}");
    assert_eq!(plan(&place, "run"), plan(&place, "other"), "{fault}");
    let of = |out| figures(&Metrics::read(&place, out));
    assert_eq!(of("run"), of("other"), "{fault}");

    let file = kept(&place);
    let text = std::fs::read_to_string(&file).unwrap();
    let verdicts: Value = serde_json::from_str(&text).unwrap();
    for (of, _) in FAMILIES {
        let of_widths = verdicts[of].as_object().unwrap();
        let expected = if of == family { verdict } else { "passed" };
        let all = of_widths.values();
        assert_eq!(
            all.map(|kept| &kept["verdict"]).collect::<Vec<_>>(),
            [expected],
            "{text}"
        );
    }
    let later = train(&place, "--out later", &[]).succeeds();
    assert!(later.stderr.contains(&said), "{later:?}");
    assert_eq!(kinds(&record(&place, "later")), taken);
    let named = format!("--set {family}.kernels=sm90 --out named");
    let refusal = format!("{family}.kernels is sm90, and {said}");
    train(&place, &named, &[]).fails(5, &[&refusal, "at auto or sm80"]);
    assert!(!place.path("named").exists());

    std::fs::remove_file(file).unwrap();
    train(&place, "--out anew", &[]).succeeds();
    assert_eq!(kinds(&record(&place, "anew")), ["sm90"; 2]);
}

#[test]
fn kernels_that_are_wrong_are_given_up() {
    given_up("wrong", "wrong", "were wrong in a trial: an element of ");
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
    for (set, out, expected) in [
        ("", "second", ["sm90", "sm90"]),
        ("--set model.experts.ffn=48", "wider", ["sm90", "sm80"]),
        ("--set model.head_dim=48", "narrower", ["sm80", "sm90"]),
    ] {
        train(&place, &format!("{set} --out {out}"), &faulty).succeeds();
        assert_eq!(kinds(&record(&place, out)), expected, "{out}");
    }
}

/// A GPU in compute mode EXCLUSIVE_PROCESS lets in one process at a time: the trial is over before the run comes.
#[test]
fn they_are_tried_before_the_run_opens_the_gpu() {
    let place = Workplace::new();
    let gpu = place.path("gpu");
    let exclusive = [("STAND_IN_EXCLUSIVE", gpu.to_str().unwrap())];
    train(&place, "--out run", &exclusive).succeeds();
    assert_eq!(kinds(&record(&place, "run")), ["sm90"; 2]);
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
    assert_eq!(kinds(&record(&place, "run")), ["sm80"; 2]);
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
    assert_eq!(kinds(&record(&place, "run")), ["sm90"; 2]);
}

#[test]
fn the_doctor_tries_them() {
    let place = Workplace::new();
    let doctor = |settings: &[(&str, &str)]| -> Value {
        let settings = [&[IDLE], settings].concat();
        let told = on_gpu(&place, "doctor --json --threads 1", &settings).succeeds();
        let machine: Value = serde_json::from_str(&told.stdout).unwrap();
        machine["gpus"][0].clone()
    };
    let wrong = ("STAND_IN_SM90", "wrong");
    let (passing, ampere) = (doctor(&[]), doctor(&[AMPERE]));
    train(&place, "--out run", &[wrong]).succeeds();
    let (after, failing) = (doctor(&[]), doctor(&[wrong]));
    let told = on_gpu(&place, "doctor --threads 1", &[IDLE, wrong]).succeeds();
    for (family, _) in FAMILIES {
        let (verdict, against) = (
            format!("{family}_kernels"),
            format!("{family}_kernels_against"),
        );
        assert_eq!(passing[&verdict]["verdict"], "passed");
        assert_eq!(passing[&against], serde_json::json!([]));
        assert_eq!(ampere[&verdict], Value::Null);
        let of_the_run = after[&against][0].as_str().unwrap();
        assert!(
            of_the_run.starts_with(&format!("{family} --"))
                && of_the_run.contains("they were wrong in a trial"),
            "{after}"
        );
        assert_eq!(failing[&verdict]["verdict"], "wrong");
        let reason = failing[&verdict]["reason"].as_str().unwrap();
        assert!(reason.starts_with("an element of "), "{reason}");
        let mut lines = told.stdout.lines();
        let line = lines.find(|line| line.contains(&format!("kernels of {family}")));
        let words = "sm80: those for 9.0 (sm90) were wrong";
        assert!(line.is_some_and(|line| line.contains(words)), "{told:?}");
    }
}

/// What `auto` took is kept to where the GPU has it; another GPU is a warning, another key a change.
#[test]
fn a_run_goes_on_with_its_kernels() {
    let place = Workplace::new();
    train(&place, "--out run", &[]).succeeds();
    let names_in_state = |run: &str, step: usize, kind: &str| {
        let state = place.text(&format!("{run}/checkpoints/step-{step}/trainer_state.json"));
        for (family, _) in FAMILIES {
            let kernels = format!("\"{family}_kernels\": \"{kind}\"");
            assert!(state.contains(&kernels), "{state}");
        }
    };
    names_in_state("run", 2, "sm90");
    let go_on = |flags: &str, settings: &[(&str, &str)]| {
        let resume = format!("--resume run/checkpoints/step-2 --steps 3 {flags}");
        on_gpu(&place, &resume, settings)
    };
    let change = |family: &str| format!("{family}.kernels: sm90 before, sm80 now");
    for (family, _) in FAMILIES {
        let named = format!("--set {family}.kernels=sm80 --out named-{family}");
        go_on(&named, &[]).fails(2, &[&change(family), "--allow-change"]);
        go_on(&format!("{named} --allow-change"), &[]).succeeds();
    }
    let same = go_on("--out same", &[]).succeeds();
    assert!(!same.stderr.contains(".kernels"), "{same:?}");
    assert_eq!(kinds(&record(&place, "same")), ["sm90"; 2]);
    let elsewhere = go_on("--out elsewhere", &[AMPERE]).succeeds();
    for (family, _) in FAMILIES {
        let change = change(family);
        let warned = elsewhere.stderr.lines().find(|line| line.contains(&change));
        assert!(
            warned.is_some_and(|line| line.contains("WARN")),
            "{elsewhere:?}"
        );
    }
    assert_eq!(kinds(&record(&place, "elsewhere")), ["sm80"; 2]);
    // What went on elsewhere stays with its kernels.
    let back = "--resume elsewhere --steps 4";
    on_gpu(&place, back, &[]).succeeds();
    let lines = Metrics::read(&place, "elsewhere");
    let resumed = lines.of_kind("resume").last().unwrap().clone();
    assert_eq!(kinds(&resumed), ["sm80"; 2], "{resumed}");
    names_in_state("elsewhere", 4, "sm80");
}
