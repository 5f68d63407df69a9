//! What ranks save, any number of ranks goes on with: to the bits of the run that was not interrupted.

use crate::metrics::Metrics;
use crate::ranks::job::{Run, command, open_mpi, place, train, train_alone};
use crate::workplace::{Workplace, outcome};
use std::path::Path;
use std::process::Command;

/// Flags that end a run before its last step, with a checkpoint.
const INTERRUPTED: &str = "--steps 2 --save-every 2";

/// Loss, norm and weights after the last step.
fn end(run: &Run) -> (Vec<String>, &[u8]) {
    (last(&run.metrics), &run.weights)
}

fn last(metrics: &Metrics) -> Vec<String> {
    let step = *metrics.steps().last().unwrap();
    let names = ["step", "loss", "grad_norm", "tokens"];
    names.map(|name| step[name].to_string()).into()
}

/// Trains two steps on so many ranks (none: without a launcher), and saves.
fn interrupt(place: &Workplace, ranks: Option<usize>, way: &str, out: &str) {
    let way = format!("{way} {INTERRUPTED}");
    match ranks {
        Some(ranks) => drop(train(place, ranks, &way, out)),
        None => drop(train_alone(place, &way, out)),
    }
}

/// Goes on from there on so many ranks, in a folder of its own.
fn go_on(place: &Workplace, from: &str, ranks: Option<usize>, way: &str) -> Run {
    let out = format!("{from}-on-{}", ranks.unwrap_or(0));
    let way = format!("{way} --resume {from}");
    match ranks {
        Some(ranks) => train(place, ranks, &way, &out),
        None => train_alone(place, &way, &out),
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// Saved at four ranks in each form of states, resumed at two, and by one process.
#[test]
fn any_number_of_ranks_goes_on() {
    let ways = [
        ("--config llama.toml", ["--zero 1", "--zero 3", "--zero 0"]),
        (
            "--config llama.toml --optimizer muon --state-dtype 8bit",
            [
                "--zero 3 --offload-optimizer pinned --offload-parameters pinned",
                "--zero 2 --offload-optimizer states --offload-parameters pinned",
                "--zero 1",
            ],
        ),
        (
            "--config gpt2.toml --dtype bf16 --master bf16-split",
            [
                "--zero 2",
                "--zero 1 --offload-optimizer pinned",
                "--zero 3",
            ],
        ),
        (
            "--config gpt2.toml --dtype bf16 --master bf16+8 --optimizer adafactor",
            [
                "--zero 1 --offload-optimizer states",
                "--zero 3 --offload-optimizer pinned --offload-parameters pinned --recompute full",
                "--zero 0",
            ],
        ),
        (
            "--config llama.toml --state-dtype 8bit --set train.freeze=[\"*embed_tokens*\",\"*.layers.0.*\",\"*.k_proj.*\"] \
             --eval-data data.safetensors --eval-every 1 --set eval.samples=4",
            ["--zero 3 --shard-group 2", "--zero 2", "--zero 3"],
        ),
    ];
    for (number, (way, [first, second, third])) in ways.into_iter().enumerate() {
        let place = place();
        let whole = train_alone(&place, &format!("{way} --zero 0"), "whole");
        let saved = format!("saved-{number}");
        interrupt(&place, Some(4), &format!("{way} {first}"), &saved);
        let files = names(&place.path(&format!("{saved}/checkpoints/step-2")));
        let parts = files.iter().filter(|name| name.starts_with("rank-"));
        assert_eq!(parts.count(), 4, "{files:?}");
        assert!(!files.contains(&"model.safetensors".into()), "{files:?}");
        let on_two = go_on(&place, &saved, Some(2), &format!("{way} {second}"));
        let alone = go_on(&place, &saved, None, &format!("{way} {third}"));
        assert!(end(&on_two) == end(&whole), "{way}: two ranks");
        assert!(end(&alone) == end(&whole), "{way}: one process");
        assert_eq!(
            on_two.metrics.steps().len(),
            1,
            "the others were made before"
        );
    }
}

/// Adapters that ranks saved in pieces go out as PEFT has them.
#[test]
fn adapters_of_ranks_are_exported() {
    let place = place();
    let way = "--config llama.toml --lora 4 --zero 1";
    interrupt(&place, Some(2), way, "saved");
    interrupt(&place, None, way, "alone");
    place.trainer("export saved --out exported").succeeds();
    let folders = ["exported", "alone/model"];
    let [exported, alone] = folders.map(|folder| names(&place.path(folder)));
    assert_eq!(exported, alone);
    for file in ["adapter_model.safetensors", "adapter_config.json"] {
        let [one, other] =
            folders.map(|folder| std::fs::read(place.path(folder).join(file)).unwrap());
        assert!(one == other, "{file}");
    }
}

/// What one process saved, ranks go on with; and in the same folder, from what they saved themselves.
#[test]
fn ranks_go_on_from_one_process() {
    let place = place();
    let way = "--config llama.toml --zero 1";
    let whole = train_alone(&place, way, "whole");
    interrupt(&place, None, way, "alone");
    let files = names(&place.path("alone/checkpoints/step-2"));
    assert!(
        files.contains(&"model.safetensors".into()),
        "as without ranks: {files:?}"
    );
    let on_four = go_on(&place, "alone", Some(4), "--config llama.toml --zero 3");
    assert!(end(&on_four) == end(&whole));
    let again = "--config llama.toml --zero 2 --resume latest --save-every 3";
    interrupt(&place, Some(2), "--config llama.toml --zero 2", "same");
    std::fs::remove_dir_all(place.path("same/model")).unwrap();
    let same = train(&place, 2, again, "same");
    assert!(same.bits() == whole.bits());
    assert_eq!(names(&place.path("same/checkpoints")), ["step-2", "step-3"]);
}

/// Beside the steps or while they wait, the same bytes; of which the last ones stay.
#[test]
fn saved_beside_the_steps() {
    let place = place();
    let way = "--config llama.toml --zero 2 --save-every 1 --keep-last 2";
    for (more, out) in [("", "beside"), ("--save-blocking", "waiting")] {
        train(&place, 2, &format!("{way} {more}"), out);
        assert_eq!(
            names(&place.path(&format!("{out}/checkpoints"))),
            ["step-2", "step-3"]
        );
    }
    for name in names(&place.path("beside/checkpoints/step-3")) {
        let read =
            |out: &str| std::fs::read(place.path(&format!("{out}/checkpoints/step-3/{name}")));
        let (beside, waiting) = (read("beside").unwrap(), read("waiting").unwrap());
        let differs = name == "config.toml" || name == "manifest.json";
        assert_eq!(beside == waiting, !differs, "{name}");
    }
    // A rank's part alone is copied, and the copy is planned.
    let pinned = |out: &str| {
        let run = Run::read(&place, out, 2);
        let plan = run.plans[0]["host_pinned_bytes"].as_u64().unwrap();
        assert_eq!(run.field(0, "host_pinned_bytes"), [plan; 3]);
        plan
    };
    let part =
        std::fs::metadata(place.path("beside/checkpoints/step-3/rank-00000-of-00002.safetensors"));
    let (copy, part) = (pinned("beside") - pinned("waiting"), part.unwrap().len());
    assert!(copy <= part && part < copy + 20_000, "{copy} of {part}");
}

/// One process reads what ranks wrote: to evaluate it, and to make a model of it.
#[test]
fn exported_by_one_process() {
    for model in ["llama", "gpt2"] {
        let place = place();
        interrupt(
            &place,
            Some(4),
            &format!("--config {model}.toml --zero 3"),
            "run",
        );
        place.trainer("export run --out exported").succeeds();
        let read =
            |name: &str| std::fs::read(place.path(&format!("{name}/model.safetensors"))).unwrap();
        assert!(read("exported") == read("run/model"), "{model}");
        let eval = |from: &str| {
            let eval = format!("eval {from} --data data.safetensors --json");
            let told: serde_json::Value =
                serde_json::from_str(&place.trainer(&eval).succeeds().stdout).unwrap();
            told["loss"].as_f64().unwrap()
        };
        assert_eq!(eval("run"), eval("exported"), "{model}");
    }
}

/// A number of ranks is no other run, another number of micro-batches is.
#[test]
fn what_changes_the_bits_is_refused() {
    let place = place();
    let way = "--config llama.toml --zero 1";
    interrupt(&place, Some(2), way, "run");
    let arguments = format!("{way} --accum 1 --resume run --out other --quiet");
    let refused = outcome(command(&place, open_mpi(2), &arguments), "");
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(
        refused
            .stderr
            .contains("ranks x batch.accum: 4 before, 2 now"),
        "{refused:?}"
    );
}

/// A rank that has no room costs the checkpoint and no step; the first one says whose it was.
#[test]
fn a_rank_without_room() {
    let place = place();
    let way = "--config llama.toml --zero 1 --accum 2 --quiet --out run";
    outcome(
        command(
            &place,
            open_mpi(2),
            &format!("{way} --steps 1 --save-every 1"),
        ),
        "",
    )
    .succeeds();
    let mut launcher = open_mpi(2);
    let script = format!(
        "[ \"$OMPI_COMM_WORLD_RANK\" = 1 ] && ulimit -f 100; exec {} \"$@\"",
        env!("CARGO_BIN_EXE_trainer")
    );
    launcher.args(["sh", "-c", &script, "trainer"]);
    let arguments = "--resume latest --save-every 1 --accum 2 --quiet --out run --steps 3";
    let job: &mut Command = launcher
        .args(arguments.split_whitespace())
        .current_dir(place.path(""));
    let failed = job.env("NO_COLOR", "1").output().unwrap();
    let said = String::from_utf8_lossy(&failed.stderr);
    assert_eq!(
        failed.status.code(),
        Some(4),
        "its last steps are lost: {said}"
    );
    assert!(said.contains("want of room: rank 1: "), "{said}");
    assert_eq!(names(&place.path("run/checkpoints")), ["step-1"], "{said}");
    assert_eq!(
        Metrics::read(&place, "run").steps().len(),
        3,
        "training went on: {said}"
    );
    let again = format!("{way} --resume latest --steps 4 --save-every 4");
    outcome(command(&place, open_mpi(2), &again), "").succeeds();
    assert_eq!(names(&place.path("run/checkpoints")), ["step-1", "step-4"]);
}

/// One command begins a job, goes on with it, and begins again what was killed before it saved anything or had no room.
#[test]
fn one_command_whatever_ended_the_job() {
    let place = place();
    let saving = place.text("llama.toml").replace("every = 0", "");
    place.file("saving.toml", saving);
    let way = "--config saving.toml --zero 2 --resume auto";
    let whole = train(&place, 2, way, "whole");
    assert_eq!(names(&place.path("whole/checkpoints")), ["step-3"]);
    for (rank, plan) in whole.plans.iter().enumerate() {
        let part = format!("whole/checkpoints/step-3/rank-{rank:05}-of-00002.safetensors");
        let part = std::fs::metadata(place.path(&part)).unwrap();
        assert_eq!(plan["checkpoint_bytes"], part.len(), "rank {rank}");
    }
    let model = std::fs::metadata(place.path("whole/model/model.safetensors")).unwrap();
    assert_eq!(whole.plans[0]["model_bytes"], model.len());

    let ended = |more: &str, out: &str| {
        let arguments = format!("--accum 2 --quiet --zero 2 {more} --out {out}");
        outcome(command(&place, open_mpi(2), &arguments), &arguments)
    };
    ended("--config saving.toml --steps 2", "saved").succeeds();
    ended("--config llama.toml --steps 2", "killed").succeeds();
    for part in ["killed", "killed/ranks/0", "killed/ranks/1"] {
        let file = format!("{part}/metrics.jsonl");
        let text = place.text(&file);
        let lines = text.split_inclusive('\n');
        let before: String = lines
            .filter(|line| !line.contains(r#""kind":"end""#))
            .collect();
        assert_ne!(before, text);
        place.file(&file, before);
    }
    let refused = ended("--config saving.toml --memory-limit 1KiB", "refused");
    assert_eq!(refused.code, Some(3), "{refused:?}");
    for (out, resumed) in [("saved", 1), ("killed", 0), ("refused", 0)] {
        let run = train(&place, 2, way, out);
        assert!(run.bits() == whole.bits(), "{out}");
        assert_eq!(run.metrics.of_kind("resume").count(), resumed, "{out}");
        assert_eq!(run.ranks[1].steps().len(), 3, "{out}");
        assert!(!place.path(&format!("{out}/oom.json")).exists());
    }
}
