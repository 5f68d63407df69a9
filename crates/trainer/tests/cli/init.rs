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
        (
            "--set model.norm_eps=1e-6",
            "model.norm_eps is 0.000001",
            "0.00001",
        ),
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
