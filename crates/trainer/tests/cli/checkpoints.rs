//! What a run saves, and what becomes of it when the disk, the machine or another run is against it.

use crate::metrics::Metrics;
use crate::workplace::{Workplace, until};
use std::process::{Child, Stdio};

#[test]
fn the_last_ones_and_the_best_are_kept() {
    let place = Workplace::new();
    place.file(
        "eval.txt",
        "the rain in spain stays mainly in the plain ".repeat(9),
    );
    // Its rate is so high that the model gets worse, so that the best is an early one.
    let run = "--config small.toml --steps 8 --lr 1 --save-every 2 --keep-last 2 --quiet";
    place.trainer(&format!("{run} --out run")).succeeds();
    assert_eq!(place.names("run/checkpoints"), ["step-6", "step-8"]);
    let best = "--eval-every 1 --eval-data eval.txt --keep-best --out best";
    place.trainer(&format!("{run} {best}")).succeeds();
    let metrics = Metrics::read(&place, "best");
    let evals: Vec<_> = metrics.of_kind("eval").collect();
    assert_eq!(evals.len(), 8);
    let lowest = evals.iter().min_by(|a, b| {
        let loss = |eval: &serde_json::Value| eval["loss"].as_f64().unwrap();
        loss(a).total_cmp(&loss(b))
    });
    let lowest = lowest.unwrap()["step"].as_u64().unwrap();
    assert!(lowest < 6, "the test needs an early best: {evals:?}");
    let kept = place.names("best/checkpoints");
    assert!(
        kept.contains(&format!("step-{lowest}")),
        "{lowest}: {kept:?}"
    );
    assert!(
        kept.len() <= 3 && kept.contains(&"step-8".into()),
        "{kept:?}"
    );
    // Evaluations change no step.
    let plain = Metrics::read(&place, "run");
    assert_eq!(plain.losses(), metrics.losses());
    let peaks = |metrics: &Metrics| metrics.steps()[7]["peak_bytes"].clone();
    assert_eq!(peaks(&plain), peaks(&metrics));
    for eval in evals {
        assert_eq!(eval["peak_bytes"], eval["planned_peak_bytes"]);
    }
}

/// The copy that is written in the background is in the plan, and so is its absence.
#[test]
fn the_copy_is_planned() {
    let place = Workplace::new();
    let run = "--config small.toml --steps 2 --quiet --save-every 2";
    let mut pinned = Vec::new();
    for (out, more) in [("copy", ""), ("blocking", "--save-blocking")] {
        place
            .trainer(&format!("{run} {more} --out {out}"))
            .succeeds();
        let plan: serde_json::Value =
            serde_json::from_str(&place.text(&format!("{out}/plan.json"))).unwrap();
        let step = Metrics::read(&place, out).steps()[1].clone();
        assert_eq!(plan["host_pinned_bytes"], step["host_pinned_bytes"]);
        pinned.push(step["host_pinned_bytes"].as_u64().unwrap());
    }
    let files = ["model", "optimizer"].map(|stem| {
        let file = place.path(&format!("copy/checkpoints/step-2/{stem}.safetensors"));
        std::fs::metadata(file).unwrap().len()
    });
    assert_eq!(pinned[1], 0);
    let held: u64 = files.iter().sum();
    assert!(
        pinned[0] <= held && held < pinned[0] + 20_000,
        "{pinned:?} {files:?}"
    );
}

/// Files may grow to so many KiB: enough for all but a checkpoint.
#[test]
fn a_full_disk_stops_no_training() {
    let place = Workplace::new();
    let run = "--config small.toml --steps 3 --save-every 1 --keep-last 1 --quiet --out run";
    place
        .trainer(&run.replace("--steps 3", "--steps 1"))
        .succeeds();
    for blocking in ["", "--save-blocking"] {
        let trainer = env!("CARGO_BIN_EXE_trainer");
        let more = format!("--resume latest --steps 4 --out run --quiet {blocking}");
        let outcome = std::process::Command::new("sh")
            .args(["-c", &format!("ulimit -f 300; exec {trainer} {more}")])
            .current_dir(place.path(""))
            .output()
            .unwrap();
        let stderr = String::from_utf8(outcome.stderr).unwrap();
        assert_eq!(
            outcome.status.code(),
            Some(4),
            "its last steps are lost: {stderr}"
        );
        assert!(stderr.contains("want of room"), "{stderr}");
        assert_eq!(place.names("run/checkpoints"), ["step-1"], "{stderr}");
        let metrics = Metrics::read(&place, "run");
        assert_eq!(metrics.steps().len(), 4, "training went on: {stderr}");
    }
    // With room again it goes on from what is whole.
    place
        .trainer("--resume latest --steps 4 --out run --quiet")
        .succeeds();
    assert_eq!(place.names("run/checkpoints"), ["step-4"]);
}

fn start(place: &Workplace, arguments: &str) -> Child {
    let mut command = place.command(arguments);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

#[test]
fn two_runs_into_one_folder() {
    let place = Workplace::new();
    let run = "--config small.toml --quiet --out run";
    place
        .trainer(&format!("{run} --save-every 1 --steps 1"))
        .succeeds();
    // It saves no more, so that the second one finds what it looks for.
    let endless = "--resume latest --save-every 100000000 --steps 100000000";
    let mut first = start(&place, &format!("{run} {endless}"));
    let steps = || {
        place
            .text("run/metrics.jsonl")
            .matches(r#""kind":"step""#)
            .count()
    };
    until(&mut first, || steps() > 1);
    let second =
        place.trainer("--resume latest --out run --quiet --steps 100000001 --save-every 100000000");
    first.kill().unwrap();
    first.wait().unwrap();
    second.fails(2, &["another trainer", "run", "--out"]);
    assert!(steps() > 1, "nothing was cut from the first one's metrics");
}

/// Killed 20 times, at least half of them within a save, a run still ends as it would have.
#[test]
fn a_run_that_is_killed_again_and_again() {
    let place = Workplace::new();
    let run = "--config small.toml --set model.hidden=64 --save-every 1 --keep-last 2 --quiet --steps 100000000 --out run";
    let made = || {
        let text = std::fs::read_to_string(place.path("run/metrics.jsonl")).unwrap_or_default();
        text.matches(r#""kind":"step""#).count()
    };
    let saving = || match std::fs::read_dir(place.path("run/checkpoints")) {
        Err(_) => false,
        Ok(entries) => entries
            .flatten()
            .any(|entry| entry.file_name().to_string_lossy().ends_with(".tmp")),
    };
    let whole =
        || checkpoint::find(&place.path("run")).is_ok_and(|found| found.checkpoint.state.step > 0);
    let mut inside = 0;
    for round in 0..20 {
        let mut child = start(&place, &format!("{run} --resume auto"));
        match round {
            0 => until(&mut child, whole),
            _ => {
                let before = made();
                until(&mut child, || made() > before);
            }
        }
        if round % 2 == 1 {
            until(&mut child, saving);
        }
        child.kill().unwrap();
        child.wait().unwrap();
        inside += usize::from(saving());
    }
    assert!(inside >= 5, "only {inside} of 20 fell into a save");
    let found = checkpoint::find(&place.path("run")).unwrap().checkpoint;
    let steps = found.state.step + 3;
    let last = format!("{run} --resume auto").replace("100000000", &steps.to_string());
    place.trainer(&last).succeeds();
    let undisturbed = run
        .replace("100000000", &steps.to_string())
        .replace("--out run", "--out other");
    place.trainer(&undisturbed).succeeds();
    let [run, other] = ["run", "other"].map(|run| Metrics::read(&place, run).untimed_steps());
    assert_eq!(run, other);
    let last = |run: &str| {
        let file = place.path(&format!(
            "{run}/checkpoints/step-{steps}/optimizer.safetensors"
        ));
        std::fs::read(file).unwrap()
    };
    assert!(last("run") == last("other"));
}

/// Nor does it for its metrics, which are written when there is room: here never.
#[test]
fn a_full_disk_for_metrics() {
    let place = Workplace::new();
    let trainer = env!("CARGO_BIN_EXE_trainer");
    let command =
        format!("{trainer} --config small.toml --steps 400 --out run --set log.every=400");
    let outcome = std::process::Command::new("sh")
        .args(["-c", &format!("ulimit -f 300; exec {command}")])
        .current_dir(place.path(""))
        .output()
        .unwrap();
    let stderr = String::from_utf8(outcome.stderr).unwrap();
    assert_eq!(outcome.status.code(), Some(4), "{stderr}");
    for said in [
        "training goes on",
        "step  400/400",
        "error: cannot write run/metrics.jsonl",
    ] {
        assert_eq!(stderr.matches(said).count(), 1, "{said}: {stderr}");
    }
}

/// A signal while a checkpoint is being written waits for it: two saves at a time would destroy each other.
#[test]
fn a_signal_within_a_save() {
    let place = Workplace::new();
    let command = "--config small.toml --set model.hidden=192 --save-every 1 --keep-last 1 --quiet --steps 100000000";
    let mut within = 0;
    for round in 0..6 {
        let folder = place.path(&format!("run-{round}/checkpoints"));
        let mut child = start(&place, &format!("{command} --out run-{round}"));
        let is_saving = || match std::fs::read_dir(&folder) {
            Err(_) => false,
            Ok(entries) => entries
                .flatten()
                .any(|entry| entry.file_name().to_string_lossy().ends_with(".tmp")),
        };
        let run = folder.parent().unwrap();
        until(&mut child, || checkpoint::find(run).is_ok());
        until(&mut child, is_saving);
        within += usize::from(is_saving());
        let kill = format!("kill -s TERM {}", child.id());
        let sent = std::process::Command::new("sh")
            .args(["-c", &kill])
            .status();
        assert!(sent.unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(143));
        let found = checkpoint::find(run).unwrap();
        assert!(found.passed_over.is_empty(), "{:?}", found.passed_over);
        let metrics = Metrics::read(&place, &format!("run-{round}"));
        assert_eq!(found.checkpoint.state.step, metrics.steps().len() as u64);
    }
    assert!(within > 0, "no signal fell into a save");
}

/// An evaluation has no more sequences than its data, and that is what is planned.
#[test]
fn evaluations_are_planned_as_they_are() {
    let place = Workplace::new();
    place.file("eval.txt", "a few words only, ".repeat(10));
    let run = "--config small.toml --steps 2 --eval-every 2 --eval-data eval.txt --eval-micro-batch 64 --quiet --out run";
    place.trainer(run).succeeds();
    let metrics = Metrics::read(&place, "run");
    let eval = metrics.of_kind("eval").next().unwrap();
    assert_eq!(eval["peak_bytes"], eval["planned_peak_bytes"]);
    let empty = "--config small.toml --sample-every 1 --set log.sample_prompt=";
    place
        .trainer(empty)
        .fails(2, &["log.sample_prompt", "no tokens"]);
}
