//! `init`, and training from what it wrote.

use crate::metrics::Metrics;
use crate::workplace::Workplace;

/// A model written by `init` and read again is the one that `train` makes of the same seed.
#[test]
fn training_from_an_initialised_model_is_training() {
    let place = Workplace::new();
    let outcome = place
        .trainer("init --config small.toml --seed 5 --out model")
        .succeeds();
    assert!(
        outcome.stdout.contains("parameters in model"),
        "{outcome:?}"
    );
    let settings = "--config small.toml --seed 5";
    place
        .trainer(&format!("{settings} --init-from model --out from-model"))
        .succeeds();
    place.trainer(&format!("{settings} --out fresh")).succeeds();
    let (from_model, fresh) = (
        Metrics::read(&place, "from-model"),
        Metrics::read(&place, "fresh"),
    );
    assert_eq!(from_model.untimed_steps(), fresh.untimed_steps());

    place
        .trainer("init --config small.toml --seed 6 --out other")
        .succeeds();
    place
        .trainer(&format!("{settings} --init-from other --out from-other"))
        .succeeds();
    let from_other = Metrics::read(&place, "from-other");
    assert_ne!(from_other.losses(), fresh.losses());
}

/// Without `--config`, the folder says everything about the model.
#[test]
fn the_folder_sets_the_model() {
    let place = Workplace::new();
    let shape = "--set model.tie_embeddings=true --set model.qk_norm=true --set model.kv_heads=1";
    place
        .trainer(&format!(
            "init --config small.toml {shape} --dtype bf16 --out model"
        ))
        .succeeds();
    let settings = "--init-from model --seq 16 --steps 2";
    place.trainer(&format!("{settings} --out run")).succeeds();
    let config: toml::Table = place.text("run/config.toml").parse().unwrap();
    let model = config["model"].as_table().unwrap();
    for (key, value) in [("hidden", 32), ("layers", 2), ("kv_heads", 1), ("ffn", 48)] {
        assert_eq!(model[key].as_integer(), Some(value), "{key}");
    }
    for key in ["tie_embeddings", "qk_norm"] {
        assert_eq!(model[key].as_bool(), Some(true), "{key}");
    }
    assert_eq!(Metrics::read(&place, "run").0[0]["model"], "model");
}

/// What one run saved, another starts from.
#[test]
fn a_saved_model_is_trained_on() {
    let place = Workplace::new();
    place
        .trainer("--config small.toml --steps 30 --lr 3e-3 --save-final run/model --out run")
        .succeeds();
    place
        .trainer("--init-from run/model --seq 32 --micro-batch 4 --steps 1 --out more")
        .succeeds();
    let (first, more) = (Metrics::read(&place, "run"), Metrics::read(&place, "more"));
    let (start, continued) = (first.losses()[0], more.losses()[0]);
    assert!(continued < start - 1.0, "{start} {continued}");
}

/// A run whose model cannot be written has its training in a checkpoint, also where none was asked for.
#[test]
fn a_model_that_cannot_be_written_costs_no_training() {
    let place = Workplace::new();
    // The folder that a model is written into until it is whole.
    place.folder("model");
    place.file("model/.unfinished", "no folder");
    let run = "--config small.toml --steps 2 --save-final model";
    let checkpoint = "run/checkpoints/step-2";
    for (saves, out) in [("", "run"), ("--save-every 0", "unsaved")] {
        let failed = place.trainer(&format!("{run} {saves} --out {out}"));
        let failed = failed.fails(4, &["model/.unfinished"]);
        let told = format!(
            "{}, of which `trainer export` makes it",
            checkpoint.replace("run", out)
        );
        assert!(failed.stderr.contains(&told), "{failed:?}");
        place
            .trainer(&format!("export {out} --out {out}-model"))
            .succeeds();
    }
    std::fs::remove_file(place.path("model/.unfinished")).unwrap();
    place.trainer(&format!("{run} --out whole")).succeeds();
    let weights =
        |folder: &str| std::fs::read(place.path(folder).join("model.safetensors")).unwrap();
    assert_eq!(weights("run-model"), weights("model"));
}

#[test]
fn settings_that_contradict_the_model_are_refused() {
    let place = Workplace::new();
    place
        .trainer("init --config small.toml --out model")
        .succeeds();
    for (settings, key, found) in [
        ("--set model.hidden=64", "model.hidden is 64", "32"),
        (
            "--set model.tie_embeddings=true",
            "model.tie_embeddings is true",
            "false",
        ),
        ("--set model.ffn=64", "model.ffn is 64", "48"),
        ("--config tiny", "model.", "48"),
    ] {
        for command in ["train", "plan"] {
            place
                .trainer(&format!("{command} --init-from model {settings}"))
                .fails(
                    2,
                    &[
                        key,
                        &format!("config.json says {found}"),
                        "leave the setting out",
                    ],
                );
        }
    }
    place
        .trainer("--init-from model --set model.hidden=32 --seq 32 --steps 1 --out run")
        .succeeds();
}

/// A model that came with weights may be trained with other dropout: no weight's shape depends on it.
#[test]
fn what_shapes_no_weight_may_be_changed() {
    let place = Workplace::new();
    let gpt2 = "--set model.norm=layer --set model.activation=gelu_tanh --set model.positions=learned \
                --set model.max_positions=32 --set model.biases=true --set model.tie_embeddings=true";
    place
        .trainer(&format!("init --config small.toml {gpt2} --out model"))
        .succeeds();
    let run = |dropout: &str, out: &str| {
        let command = format!(
            "--init-from model --seq 32 --steps 2 --seed 3 {dropout} --out {out} --save-final {out}-model"
        );
        let stderr = place.trainer(&command).succeeds().stderr;
        (Metrics::read(&place, out).losses(), stderr)
    };
    let (plain, quiet) = run("", "plain");
    let (dropped, told) = run("--set model.dropout=0.2", "dropped");
    assert_ne!(plain, dropped);
    let words = "model.dropout is 0.2, where model/config.json says 0";
    assert!(
        told.contains(words) && !quiet.contains("model.dropout"),
        "{told}"
    );
    let config = place.text("dropped-model/config.json");
    assert!(config.contains("\"attn_pdrop\": 0.2"), "{config}");
}

/// A window shapes no weight either, and what goes out says that it is there.
#[test]
fn a_window_may_be_given_to_a_model_without() {
    let place = Workplace::new();
    place
        .trainer("init --config small.toml --out model")
        .succeeds();
    let run = |window: &str, out: &str| {
        let command = format!(
            "--init-from model --seq 32 --steps 2 {window} --out {out} --save-final {out}-model"
        );
        place.trainer(&command).succeeds();
        Metrics::read(&place, out).losses()
    };
    let window = "--set model.sliding_window=4";
    assert_ne!(run("", "plain"), run(window, "windowed"));
    let config = place.text("windowed-model/config.json");
    assert!(config.contains("\"sliding_window\": 4"), "{config}");
    // Mistral has windows in all layers, or in none.
    let some =
        "--init-from windowed-model --seq 32 --steps 1 --set model.full_attention_layers=[0]";
    place
        .trainer(&format!("{some} --out more --save-final more-model"))
        .succeeds();
    let config = place.text("more-model/config.json");
    assert!(config.contains("\"model_type\": \"smollm3\""), "{config}");
    place
        .trainer(&format!("{some} --set model.family=mistral --out never"))
        .fails(2, &["model.family"]);
}

#[test]
fn a_warmup_that_outlasts_the_run_is_told_of() {
    let place = Workplace::new();
    let run = |warmup: usize| {
        let command = format!("plan --config small.toml --device cpu --steps 4 --warmup {warmup}");
        place.trainer(&command).succeeds().stderr
    };
    assert!(run(5).contains("lr.warmup_steps is 5, and the run has 4 steps"));
    assert!(!run(4).contains("lr.warmup_steps"));
}
