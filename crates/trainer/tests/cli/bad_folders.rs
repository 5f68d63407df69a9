//! Folders that cannot be written to: exit code 2, before anything is computed.

use crate::workplace::Workplace;

#[test]
fn a_folder_with_something_in_it_is_somebodys() {
    let place = Workplace::new();
    place.folder("full");
    place.file("full/letter", "");
    for command in ["train --config small.toml", "init --config small.toml"] {
        place
            .trainer(&format!("{command} --out full"))
            .fails(2, &["full is not empty", "new or empty", "--out"]);
    }
    let left = std::fs::read_dir(place.path("full")).unwrap().count();
    assert_eq!(left, 1, "nothing is added");
}

#[test]
fn a_run_directory_that_exists_is_not_written_again() {
    let place = Workplace::new();
    let command = "--config small.toml --steps 1 --out run";
    place.trainer(command).succeeds();
    let metrics = place.text("run/metrics.jsonl");
    place.trainer(command).fails(2, &["run is not empty"]);
    assert_eq!(place.text("run/metrics.jsonl"), metrics);
}

#[test]
fn what_is_no_folder() {
    let place = Workplace::new();
    for command in ["train --config small.toml", "init --config small.toml"] {
        for out in ["small.toml", "small.toml/run"] {
            place
                .trainer(&format!("{command} --out {out}"))
                .fails(2, &[out, "Not a directory", "--out"]);
        }
        // Nobody can make a folder there, root neither.
        place
            .trainer(&format!("{command} --out /proc/run"))
            .fails(2, &["cannot make the folder /proc/run", "--out"]);
    }
}

/// A run of days does not end with nowhere to put its model.
#[test]
fn the_folder_for_the_trained_model_is_made_first() {
    let place = Workplace::new();
    place
        .trainer("--config small.toml --steps 1000000 --save-final small.toml")
        .fails(2, &["cannot make the folder small.toml", "--save-final"]);
}

/// Nor does it end by writing over another one, the model that it started from least of all.
#[test]
fn a_model_that_is_there_is_not_written_over() {
    let place = Workplace::new();
    place
        .trainer("init --config small.toml --out model")
        .succeeds();
    let weights = std::fs::read(place.path("model/model.safetensors")).unwrap();
    for (model, file) in [
        ("model", "config.json"),
        ("shards", "model.safetensors.index.json"),
    ] {
        place.folder(model);
        if model == "shards" {
            place.file("shards/model.safetensors.index.json", "{}");
        }
        place
            .trainer(&format!(
                "--init-from model --seq 32 --steps 1 --save-final {model} --out run"
            ))
            .fails(
                2,
                &[
                    model,
                    "has a model already",
                    file,
                    "--save-final",
                    "name another",
                ],
            );
        assert!(!place.path("run").exists(), "refused before the run");
    }
    assert_eq!(
        std::fs::read(place.path("model/model.safetensors")).unwrap(),
        weights
    );
    // What else is in a folder is no model.
    place.folder("mine");
    place.file("mine/tokenizer.json", "{}");
    place
        .trainer("--init-from model --seq 32 --steps 1 --save-final mine --out run")
        .succeeds();
    assert!(place.path("mine/model.safetensors").exists());
}
