//! One command for a job that may be ended at any time: `--resume auto`; and a folder that a run without a step does not block.

use crate::metrics::Metrics;
use crate::workplace::{Outcome, Workplace, until};
use serde_json::Value;
use std::process::Stdio;

/// A command that goes on wherever it was ended.
const JOB: &str = "--config plain.toml --resume auto --save-final model --quiet --out run";

fn oom(place: &Workplace, out: &str) -> Value {
    serde_json::from_str(&place.text(&format!("{out}/oom.json"))).unwrap()
}

/// All files of a folder, with what is in them.
fn contents(place: &Workplace, folder: &str) -> Vec<(String, Vec<u8>)> {
    let files = place.names(folder).into_iter();
    let files = files.filter(|name| place.path(&format!("{folder}/{name}")).is_file());
    files
        .map(|name| {
            let bytes = std::fs::read(place.path(&format!("{folder}/{name}"))).unwrap();
            (name, bytes)
        })
        .collect()
}

/// As `exit-codes.md` says: the hint's `--set` can be appended to the same command, `--out` included.
#[test]
fn a_fix_is_appended_to_the_command_that_had_no_room() {
    let place = Workplace::new();
    let plan = place
        .trainer("plan --json --config small.toml --device cpu")
        .succeeds();
    let plan: Value = serde_json::from_str(&plan.stdout).unwrap();
    let limit = plan["peak_bytes"].as_u64().unwrap() - 256;
    let command = format!(
        "--config small.toml --device cpu --memory-limit {limit} --trace --tensorboard --out run"
    );
    place.trainer(&command).fails(3, &["cheapest fix"]);
    let first = oom(&place, "run");
    // Tried in a step, it leaves a report just as well.
    place
        .trainer(&format!("{command} --force"))
        .fails(3, &["cheapest fix"]);
    assert_eq!(oom(&place, "run"), first);
    let fix = first["fixes"][0]["set"].as_array().unwrap().iter();
    let fix: Vec<String> = fix
        .map(|set| format!("--set {}", set.as_str().unwrap()))
        .collect();
    let fixed = place
        .trainer(&format!("{command} {}", fix.join(" ")))
        .succeeds();
    assert!(
        fixed.stderr.contains("made no step: it is replaced"),
        "{fixed:?}"
    );
    assert!(!place.path("run/oom.json").exists(), "it was another run's");
    let metrics = Metrics::read(&place, "run");
    assert_eq!(
        (metrics.of_kind("run").count(), metrics.steps().len()),
        (1, 4)
    );
    let events = place
        .names("run")
        .into_iter()
        .filter(|name| name.starts_with("events.out"));
    assert_eq!(events.count(), 1);
    // Now it has something in it.
    place
        .trainer(&command)
        .fails(2, &["run is not empty", "--resume auto"]);
}

/// Of a folder that has anything else in it, nothing is touched.
#[test]
fn what_is_somebodys_own_stays() {
    let place = Workplace::new();
    let refused = "--config small.toml --memory-limit 1KiB --out run";
    place.trainer(refused).fails(3, &["out of memory"]);
    let settings = place.text("run/config.toml");
    let other = format!("# tried with less memory\n{settings}");
    let altered = [
        ("notes.txt", "why?"),
        ("config.toml", other.as_str()),
        ("memory/mine", ""),
    ];
    for (name, text) in altered {
        place.folder("run/memory");
        place.file(&format!("run/{name}"), text);
        let before = contents(&place, "run");
        for more in ["", "--resume auto"] {
            place
                .trainer(&format!("--config small.toml --out run {more}"))
                .fails(2, &["run is not empty", "new or empty"]);
        }
        assert!(before == contents(&place, "run"), "{name}");
        std::fs::remove_file(place.path(&format!("run/{name}"))).unwrap();
        place.file("run/config.toml", &settings);
    }
    // A folder that no run was in, though its file has a name that a run's has.
    place.folder("mine");
    place.file("mine/config.toml", &settings);
    place
        .trainer("--config mine/config.toml --out mine")
        .fails(2, &["mine is not empty"]);
    assert_eq!(place.names("mine"), ["config.toml"]);
    assert_eq!(place.text("mine/config.toml"), settings);
}

/// The job, undisturbed: its steps and its model.
fn undisturbed() -> (Vec<String>, Vec<u8>) {
    let place = Workplace::new();
    place.trainer(JOB).succeeds();
    ended(&place)
}

fn ended(place: &Workplace) -> (Vec<String>, Vec<u8>) {
    let metrics = Metrics::read(place, "run");
    assert_eq!(metrics.end_reason(), "done");
    let model = std::fs::read(place.path("model/model.safetensors")).unwrap();
    (metrics.untimed_steps(), model)
}

/// What lies in the folder after each thing that a run writes before its first checkpoint, and in the midst of it.
#[test]
fn wherever_a_run_was_killed_the_same_command_goes_on() {
    let whole = undisturbed();
    let place = Workplace::new();
    place
        .trainer(&format!("{JOB} --dump-gradients 2"))
        .succeeds();
    let begun = |name: &str| place.text(&format!("run/{name}"));
    let (settings, plan, metrics) = (
        begun("config.toml"),
        begun("plan.json"),
        begun("metrics.jsonl"),
    );
    let gradients = std::fs::read(place.path("run/gradients/step-2.safetensors")).unwrap();
    let lines: Vec<&str> = metrics.split_inclusive('\n').collect();
    let two = lines[..3].concat();
    let torn = format!("{two}{}", &lines[3][..10]);
    let written: [(&str, &[u8]); 11] = [
        (".lock", b"1"),
        (".config.toml.17.tmp", &settings.as_bytes()[..9]),
        ("config.toml", settings.as_bytes()),
        ("plan.json", plan.as_bytes()),
        ("metrics.jsonl", b""),
        ("metrics.jsonl", lines[0].as_bytes()),
        ("metrics.jsonl", two.as_bytes()),
        ("gradients/step-2.safetensors", &gradients),
        ("metrics.jsonl", torn.as_bytes()),
        ("checkpoints/.step-4.tmp/model.safetensors", &gradients),
        ("checkpoints/.step-4.tmp/manifest.json", b"{}"),
    ];
    for end in 0..=written.len() {
        let place = Workplace::new();
        place.folder("run");
        for (name, bytes) in &written[..end] {
            let file = place.path(&format!("run/{name}"));
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, bytes).unwrap();
        }
        let steps = match end {
            ..7 => 0,
            _ => 2,
        };
        if steps > 0 {
            let refused = place.trainer("--config plain.toml --out run");
            refused.fails(2, &["run is not empty", "--resume auto"]);
        }
        let outcome = place.trainer(JOB).succeeds();
        let said = format!(
            "the run in run ended after {steps} steps, before any was saved: it begins again"
        );
        assert_eq!(
            outcome.stderr.contains(&said),
            steps > 0,
            "{end}: {outcome:?}"
        );
        assert!(ended(&place) == whole, "{end}");
        assert!(!place.path("run/gradients").exists());
        assert_eq!(place.names("run/checkpoints"), ["step-4"]);
    }
}

/// Killed by the clock, from its first moments on.
#[test]
fn killed_at_any_moment() {
    let whole = undisturbed();
    let place = Workplace::new();
    for milliseconds in [0, 2, 5, 9, 14, 20, 27, 35, 50] {
        let mut job = place.command(JOB);
        let mut child = job
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(std::time::Duration::from_millis(milliseconds));
        // It may be done.
        let _ = child.kill();
        child.wait().unwrap();
    }
    place.trainer(JOB).succeeds();
    assert!(ended(&place) == whole);
}

/// Its last step saved, and the trained model: whole, cut short, or not begun.
#[test]
fn killed_while_the_model_is_written() {
    let whole = undisturbed();
    let place = Workplace::new();
    place.trainer(JOB).succeeds();
    let again = place.trainer(JOB).succeeds();
    assert!(
        again.stdout.contains("all 4 steps were made before"),
        "{again:?}"
    );
    assert!(
        again
            .stderr
            .contains("model has a model already, which stays"),
        "{again:?}"
    );
    std::fs::remove_file(place.path("model/config.json")).unwrap();
    place.file("model/model.safetensors", "half a file");
    let refused: Outcome = place.trainer(&format!("{JOB} --steps 5"));
    refused.fails(2, &["model has a model already"]);
    place.folder("model/.unfinished");
    place.trainer(JOB).succeeds();
    assert!(ended(&place) == whole);
    assert!(!place.path("model/.unfinished").exists());
    std::fs::remove_dir_all(place.path("model")).unwrap();
    place.trainer(JOB).succeeds();
    assert!(ended(&place) == whole);
}

/// A run that is done and kept nothing is not made again: what it wrote may be all that is wanted.
#[test]
fn what_is_not_begun_again() {
    let place = Workplace::new();
    let job = "--config small.toml --resume auto --quiet --out run";
    place.trainer(job).succeeds();
    let metrics = place.text("run/metrics.jsonl");
    place
        .trainer(job)
        .fails(2, &["done after 4 steps, and saved none", "--out"]);
    assert_eq!(place.text("run/metrics.jsonl"), metrics);
    // Nor is one whose checkpoints are all damaged.
    place.trainer(JOB).fails(2, &["done"]);
    std::fs::remove_dir_all(place.path("run")).unwrap();
    place.trainer(JOB).succeeds();
    place.file("run/checkpoints/step-4/model.safetensors", "");
    place.trainer(JOB).fails(
        4,
        &[
            "no whole checkpoint",
            "step-4",
            "another folder for --out begins",
        ],
    );
    place
        .trainer("--config small.toml --resume auto")
        .fails(2, &["--resume auto", "--out"]);
    // What would begin is planned as a run that begins.
    let plan = |more: &str| {
        place
            .trainer(&format!("plan --config small.toml {more}"))
            .succeeds()
            .stdout
    };
    assert_eq!(plan("--resume auto --out none"), plan(""));
}

/// It is another run's while that goes on, though no step is made yet.
#[test]
fn a_folder_that_another_run_has() {
    let place = Workplace::new();
    let slow = "--config plain.toml --accum 100000 --resume auto --out run --quiet";
    let mut job = place.command(slow);
    let mut child = job
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let begun = || {
        std::fs::read_to_string(place.path("run/metrics.jsonl"))
            .is_ok_and(|text| text.ends_with('\n'))
    };
    until(&mut child, begun);
    let second = place.trainer("--config plain.toml --resume auto --out run");
    child.kill().unwrap();
    child.wait().unwrap();
    second.fails(2, &["another trainer"]);
    assert!(begun(), "it was not touched");
}

/// A model to start from, and settings of its own, go with it.
#[test]
fn from_a_model_of_ones_own() {
    let place = Workplace::new();
    place
        .trainer("init --config small.toml --out start")
        .succeeds();
    let job = "--init-from start --seq 32 --resume auto --save-every 2 --quiet --out run --steps";
    place.trainer(&format!("{job} 2")).succeeds();
    place.trainer(&format!("{job} 4")).succeeds();
    let metrics = Metrics::read(&place, "run");
    assert_eq!(
        (metrics.steps().len(), metrics.of_kind("resume").count()),
        (4, 1)
    );
}
