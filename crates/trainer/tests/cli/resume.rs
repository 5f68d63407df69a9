//! A run that was resumed is, bit for bit, the run that was not interrupted.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::Value;

/// Six steps with a checkpoint after the third, in batches of which an epoch has two and a half.
const RUN: &str = "--config small.toml --steps 6 --save-every 3 --data text.txt --quiet";

fn place() -> Workplace {
    let place = Workplace::new();
    let text: Vec<u8> = (0..331u32).map(|at| (at * at % 97) as u8 + 20).collect();
    place.file("text.txt", text);
    place
}

/// Loss, norm and rate of every step, as they are written.
fn course(metrics: &Metrics) -> Vec<(u64, [String; 3])> {
    let of = |step: &Value| {
        let fields = ["loss", "grad_norm", "lr"].map(|name| step[name].to_string());
        (step["step"].as_u64().unwrap(), fields)
    };
    metrics.steps().into_iter().map(of).collect()
}

/// The bytes of a checkpoint's tensors.
fn tensors(place: &Workplace, checkpoint: &str) -> [Vec<u8>; 2] {
    ["model", "optimizer"]
        .map(|stem| std::fs::read(place.path(&format!("{checkpoint}/{stem}.safetensors"))).unwrap())
}

/// Every form of the optimizer, with where its states live, and what may change on the way.
#[test]
fn whatever_the_optimizer_and_what_changes_meanwhile() {
    let bf16 = "--dtype bf16 --state-dtype";
    let forms = [
        "".to_string(),
        "--set lr.schedule=cosine --set lr.warmup_steps=2 --no-shuffle".into(),
        format!("{bf16} bf16 --master bf16-split"),
        format!("{bf16} 8bit --grad-dtype bf16 --set optim.f32_states=[]"),
        format!("{bf16} 8bit --master none"),
        format!("{bf16} 8bit --master bf16+8"),
        "--offload-optimizer pinned --save-blocking".into(),
    ];
    let changes = [
        "--threads 1 --set data.prefetch=7",
        "--recompute full --offload-activations none",
        "--recompute core_attn,mlp --offload-optimizer pinned",
        "--offload-activations block_input --save-blocking",
        "--offload-optimizer pinned --threads 1",
        "--offload-optimizer pinned --set offload.window=end --threads 3",
        "--recompute full:uniform:2 --offload-optimizer none",
    ];
    for (form, change) in forms.iter().zip(changes) {
        let place = place();
        place
            .trainer(&format!("{RUN} {form} --out whole"))
            .succeeds();
        let resume = "--resume whole/checkpoints/step-3 --out rest --quiet";
        place.trainer(&format!("{resume} {change}")).succeeds();
        let [whole, rest] = ["whole", "rest"].map(|run| course(&Metrics::read(&place, run)));
        assert_eq!(rest.len(), 3, "{form}");
        assert_eq!(whole[3..], rest, "{form} | {change}");
        let [whole, rest] =
            ["whole", "rest"].map(|run| tensors(&place, &format!("{run}/checkpoints/step-6")));
        assert!(whole == rest, "{form} | {change}");
        let before = tensors(&place, "whole/checkpoints/step-3");
        assert!(
            before[0] != rest[0] && before[1] != rest[1],
            "they moved on"
        );
    }
}

/// Step lines of a folder that goes on are those of a run without a break, all fields but the clock's.
#[test]
fn a_folder_goes_on_where_its_checkpoint_is() {
    let place = place();
    place.trainer(&format!("{RUN} --out whole")).succeeds();
    place
        .trainer(&format!("{RUN} --steps 3 --out run"))
        .fails(2, &["--steps"]);
    let rows = "--config small.toml --save-every 3 --data text.txt --quiet";
    place
        .trainer(&format!("{rows} --steps 4 --out run"))
        .succeeds();
    // The last one is gone, as after a crash between two saves.
    std::fs::remove_dir_all(place.path("run/checkpoints/step-4")).unwrap();
    let again = place
        .trainer("--resume latest --out run --steps 6 --quiet")
        .succeeds();
    assert!(again.stdout.contains("6 steps"), "{again:?}");
    let [whole, run] = ["whole", "run"].map(|run| Metrics::read(&place, run));
    assert_eq!(whole.untimed_steps(), run.untimed_steps());
    let kinds: Vec<&Value> = run.0.iter().map(|record| &record["kind"]).collect();
    let (step, save) = ("step", "checkpoint");
    let first = ["run", step, step, step, save];
    let then = ["resume", step, step, step, save, "end"];
    assert_eq!(kinds, [&first[..], &then[..]].concat());
    let resumed = run.of_kind("resume").next().unwrap();
    assert_eq!(resumed["step"], 3);
    assert_eq!(run.0[0]["model"], "small");
    assert!(place.text("run/config.toml").contains("steps = 6"));
}

#[test]
fn settings_that_change_what_is_computed_are_named() {
    let place = place();
    let run = "--config small.toml --steps 3 --save-every 3 --data text.txt --quiet --out run";
    place.trainer(run).succeeds();
    place.file("other.txt", [b'x'; 400]);
    for (change, named) in [
        ("--lr 0.5 --steps 4", "lr.peak: 0.001 before, 0.5 now"),
        (
            "--micro-batch 1 --accum 4 --steps 4",
            "batch.micro: 2 before, 1 now",
        ),
        ("--state-dtype bf16 --steps 4", "optim.state_dtype"),
        ("--seed 5 --steps 4", "train.seed"),
        ("--dtype bf16 --steps 4", "train.dtype"),
        (
            "--data other.txt --steps 4",
            "the data is other than before",
        ),
        ("--set lr.schedule=linear --steps 4", "lr.schedule"),
        ("--attention flash --steps 4", "attention.backend"),
    ] {
        let command = format!("--resume run --out other --quiet {change}");
        place.trainer(&command).fails(2, &[named, "--allow-change"]);
        assert!(!place.path("other").exists(), "{change}");
        place
            .trainer(&format!("{command} --allow-change"))
            .succeeds();
        let metrics = Metrics::read(&place, "other");
        assert_eq!(metrics.steps().len(), 1, "{change}");
        let changes = metrics.of_kind("resume").next().unwrap()["changes"].to_string();
        assert!(changes.contains(named), "{changes}");
        std::fs::remove_dir_all(place.path("other")).unwrap();
    }
    // More steps matter where the schedule looks at them.
    place
        .trainer("--resume run --out on --steps 5 --quiet")
        .succeeds();
    let cosine = "--config small.toml --steps 3 --save-every 3 --set lr.schedule=cosine --quiet --out cosine";
    place.trainer(cosine).succeeds();
    let more = "--resume latest --out cosine --steps 5 --quiet";
    place
        .trainer(more)
        .fails(2, &["train.steps: 3 before, 5 now"]);
    place
        .trainer("--resume run --out less --steps 2")
        .fails(2, &["3 steps", "raise --steps"]);
}

/// Moments of one form go into another through f32, and it is said.
#[test]
fn other_forms_of_the_optimizer_are_converted() {
    let place = place();
    let run = "--config small.toml --steps 3 --save-every 3 --dtype bf16 --quiet --out run";
    place.trainer(run).succeeds();
    for form in [
        "--state-dtype 8bit",
        "--master bf16-split",
        "--master bf16+8",
        "--state-dtype bf16 --master none",
    ] {
        let command = format!("--resume run --allow-change --steps 5 --out other --quiet {form}");
        let outcome = place.trainer(&command).succeeds();
        assert!(
            outcome.stderr.contains("converted through f32"),
            "{outcome:?}"
        );
        assert_eq!(Metrics::read(&place, "other").steps().len(), 2);
        std::fs::remove_dir_all(place.path("other")).unwrap();
    }
}

#[test]
fn what_cannot_be_resumed() {
    let place = place();
    place
        .trainer("--resume latest")
        .fails(2, &["--resume latest", "--out"]);
    place
        .trainer("--resume latest --out none")
        .fails(4, &["none"]);
    place
        .trainer("--resume small.toml --out run")
        .fails(4, &["small.toml"]);
    place
        .trainer("--config small.toml --steps 1 --out run --quiet")
        .succeeds();
    place.trainer("--resume run").fails(4, &["run"]);
    place.trainer("--allow-change").fails(2, &["--resume"]);
}

/// A checkpoint that is damaged is passed over for the one before it, or refused by name.
#[test]
fn a_damaged_checkpoint_is_named_and_never_loaded() {
    let place = place();
    place.trainer(&format!("{RUN} --out run")).succeeds();
    let file = place.path("run/checkpoints/step-6/model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 5;
    bytes[last] ^= 4;
    std::fs::write(&file, bytes).unwrap();
    let named = ["step-6", "model.safetensors", "checksum"];
    place
        .trainer("--resume run/checkpoints/step-6 --out other")
        .fails(4, &named);
    let outcome = place
        .trainer("--resume latest --out run --quiet")
        .succeeds();
    for word in named {
        assert!(outcome.stderr.contains(word), "{word}: {outcome:?}");
    }
    assert_eq!(
        Metrics::read(&place, "run")
            .of_kind("resume")
            .next()
            .unwrap()["step"],
        3
    );
}

/// Also where its settings are what is damaged, and the command line has its own.
#[test]
fn a_checkpoint_with_damaged_settings_is_passed_over() {
    let place = place();
    place.trainer(&format!("{RUN} --out run")).succeeds();
    place.file("run/checkpoints/step-6/config.toml", "[memory");
    let outcome = place
        .trainer(&format!("{RUN} --resume latest --out run"))
        .succeeds();
    assert!(outcome.stderr.contains("step-6"), "{outcome:?}");
    let metrics = Metrics::read(&place, "run");
    assert_eq!(metrics.of_kind("resume").next().unwrap()["step"], 3);
}

/// Settings that the command line leaves open are those of the checkpoint that is taken, whichever file of a newer one is damaged.
#[test]
fn what_falls_back_takes_the_settings_of_what_it_falls_back_to() {
    let place = place();
    let run = RUN.replace("--steps 6", "--steps 3");
    place.trainer(&format!("{run} --out run")).succeeds();
    let more = "--resume latest --out run --steps 6 --lr 0.002 --allow-change --quiet";
    place.trainer(more).succeeds();
    let newest = |name: &str| place.path(&format!("run/checkpoints/step-6/{name}"));
    let go_on = |out: &str| {
        place
            .trainer(&format!("--resume run --steps 8 --quiet --out {out}"))
            .succeeds()
    };
    let rates = |out: &str| {
        let steps = Metrics::read(&place, out);
        let rate = |step: &Value| (step["step"].as_u64().unwrap(), step["lr"].to_string());
        steps.steps().into_iter().map(rate).next().unwrap()
    };
    go_on("whole");
    assert_eq!(rates("whole"), (7, "0.002".into()));
    let settings = place.text("run/checkpoints/step-6/config.toml");
    let same_size = settings.replace("peak = 0.002", "peak = 0.003");
    assert_ne!(same_size, settings);
    let mut weights = std::fs::read(newest("model.safetensors")).unwrap();
    *weights.last_mut().unwrap() ^= 1;
    let damages = [
        ("config.toml", Some(same_size.as_bytes())),
        ("config.toml", Some(b"[lr".as_slice())),
        ("config.toml", None),
        ("model.safetensors", Some(&weights)),
    ];
    for (number, (name, damaged)) in damages.into_iter().enumerate() {
        let (file, out) = (newest(name), format!("damaged-{number}"));
        let before = std::fs::read(&file).unwrap();
        match damaged {
            Some(bytes) => std::fs::write(&file, bytes).unwrap(),
            None => std::fs::remove_file(&file).unwrap(),
        }
        let outcome = go_on(&out);
        for word in ["step-6", name, "an earlier one is taken"] {
            assert!(outcome.stderr.contains(word), "{word}: {outcome:?}");
        }
        assert_eq!(rates(&out), (4, "0.001".into()), "{name} {number}");
        std::fs::write(&file, before).unwrap();
    }
}

/// A run that cannot go on is left as it was, its later checkpoints and its settings too.
#[test]
fn what_fails_before_its_first_step_changes_nothing() {
    let place = place();
    place.trainer(&format!("{RUN} --out run")).succeeds();
    let files = [
        "config.toml",
        "plan.json",
        "checkpoints/step-6/manifest.json",
    ];
    let read = || files.map(|name| place.text(&format!("run/{name}")));
    let (before, steps) = (read(), Metrics::read(&place, "run").untimed_steps());
    place
        .trainer("--resume run/checkpoints/step-3 --memory-limit 1KiB --quiet")
        .fails(3, &["out of memory"]);
    assert_eq!(before, read());
    assert_eq!(steps, Metrics::read(&place, "run").untimed_steps());
    place.trainer("--resume run --steps 7 --quiet").succeeds();
    assert_eq!(Metrics::read(&place, "run").steps().len(), 7);
}

/// Settings come from the checkpoint: the run's own file may be gone, or of a run that never began.
#[test]
fn settings_are_those_of_the_checkpoint() {
    let place = place();
    place
        .trainer(&format!("{RUN} --lr 0.002 --out run"))
        .succeeds();
    std::fs::remove_file(place.path("run/config.toml")).unwrap();
    place
        .trainer("--resume run/checkpoints/step-3 --quiet")
        .succeeds();
    let metrics = Metrics::read(&place, "run");
    assert_eq!(metrics.steps()[5]["lr"].to_string(), "0.002");
    assert!(place.path("run/checkpoints/step-6").exists());
    for command in ["plan", "profile"] {
        place
            .trainer(&format!("{command} --resume nowhere"))
            .fails(2, &["--resume", "no run"]);
    }
    let again = place.trainer("--resume run --quiet").succeeds();
    assert!(
        again.stdout.contains("all 6 steps were made before"),
        "{again:?}"
    );
}
