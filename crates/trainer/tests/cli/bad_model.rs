//! Model folders that cannot be started from: exit code 4, naming the file.

use crate::metrics::Metrics;
use crate::workplace::Workplace;

const HINT: &str = "hint: --init-from takes a folder in Hugging Face layout";

/// A workplace with a sound model in `model`.
fn with_model() -> Workplace {
    let place = Workplace::new();
    place
        .trainer("init --config small.toml --out model")
        .succeeds();
    place
}

fn train(place: &Workplace) -> crate::workplace::Outcome {
    place.trainer("--init-from model --seq 32 --steps 1 --out run")
}

#[track_caller]
fn config_refused(from: &str, to: &str, words: &[&str]) {
    let place = with_model();
    let sound = place.text("model/config.json");
    let changed = sound.replacen(from, to, 1);
    assert_ne!(changed, sound, "{from}");
    place.file("model/config.json", changed);
    let words = [&["model/config.json"], words].concat();
    train(&place).fails(4, &words);
    place
        .trainer("plan --init-from model --device cpu")
        .fails(4, &words);
    assert!(!place.path("run").exists(), "nothing is left behind");
}

#[test]
fn the_model_that_is_changed_below_is_sound() {
    train(&with_model()).succeeds();
}

#[test]
fn folders_that_are_not_there() {
    let place = Workplace::new();
    place.folder("empty");
    for folder in ["nowhere", "empty", "small.toml"] {
        let file = format!("cannot read {folder}/config.json");
        place
            .trainer(&format!("--init-from {folder}"))
            .fails(4, &[&file, HINT]);
    }
}

/// A link to a device that never ends is not read until memory does.
#[test]
fn files_without_end_are_refused() {
    let place = with_model();
    for (file, command, code) in [
        (
            "model/config.json",
            "plan --device cpu --init-from model",
            4,
        ),
        ("endless.toml", "plan --config endless.toml", 2),
    ] {
        let path = place.path(file);
        let _ = std::fs::remove_file(&path);
        std::os::unix::fs::symlink("/dev/zero", path).unwrap();
        place
            .trainer(command)
            .fails(code, &[file, "it has more than "]);
    }
}

/// What people name in place of a folder: the message says what to run first.
#[test]
fn names_of_the_hub_and_gguf_files() {
    let place = Workplace::new();
    place.folder("gguf");
    place.file("gguf/model-q4.gguf", "GGUF");
    for command in [
        "train --init-from",
        "plan --init-from",
        "generate --prompt a",
        "export --out out",
    ] {
        for (name, words) in [
            (
                "somebody/some-model-1.5B",
                [
                    "no folder somebody/some-model-1.5B",
                    "hint: `hf download somebody/some-model-1.5B --local-dir some-model-1.5B`",
                ],
            ),
            (
                "gguf/model-q4.gguf",
                ["as GGUF", "hint: take the model that it was made from"],
            ),
            ("gguf", ["as GGUF", "gguf_file=FILE"]),
        ] {
            place.trainer(&format!("{command} {name}")).fails(4, &words);
        }
    }
    let missing = "gguf/some-model";
    let words = format!("cannot read {missing}/config.json");
    place
        .trainer(&format!("train --init-from {missing}"))
        .fails(4, &[&words, HINT]);
}

/// Some keys of a section are compared with the folder's own.
#[test]
fn keys_of_experts_that_the_folder_has() {
    let place = with_model();
    place.trainer("init --config tiny-moe --out moe").succeeds();
    let plan = |folder: &str, set: &str| {
        place.trainer(&format!(
            "plan --init-from {folder} --device cpu --set model.experts.chosen={set}"
        ))
    };
    let config: serde_json::Value = serde_json::from_str(&place.text("moe/config.json")).unwrap();
    let chosen = config["num_experts_per_tok"].as_u64().unwrap();
    plan("moe", &chosen.to_string()).succeeds();
    let words = [
        "model.experts.chosen is 1, but moe/config.json says",
        "leave the setting out",
    ];
    plan("moe", "1").fails(2, &words);
    plan("model", "1").fails(
        2,
        &["model.experts.chosen is 1, but model/config.json says absent"],
    );
}

#[test]
fn a_config_that_describes_no_model() {
    config_refused(
        "\"vocab_size\"",
        "\"hidden_size\": 64, \"vocab_size\"",
        &["`hidden_size` is there twice"],
    );
    config_refused("{", "", &["not valid JSON"]);
    config_refused(
        "\"llama\"",
        "\"bloom\"",
        &["model_type `bloom`", "llama", "qwen3", "gpt2"],
    );
    config_refused(
        "LlamaForCausalLM",
        "LlamaForTokenClassification",
        &["`LlamaForTokenClassification`", "LlamaForCausalLM"],
    );
    config_refused(
        "\"hidden_size\": 32",
        "\"hidden_size\": 4294967296000000",
        &["more than 2^48"],
    );
    config_refused(
        "\"vocab_size\"",
        "\"vocabulary\"",
        &["`vocab_size` is missing"],
    );
    config_refused(
        "\"hidden_size\": 32",
        "\"hidden_size\": -32",
        &["`hidden_size`", "positive"],
    );
    config_refused(
        "\"hidden_size\": 32",
        "\"hidden_size\": 0",
        &["model.hidden is 0", "at least 1"],
    );
    config_refused(
        "\"silu\"",
        "\"gelu\"",
        &["`hidden_act` = \"gelu\" is not supported"],
    );
    config_refused(
        "\"rope_theta\": ",
        "\"rope_theta\": -",
        &["model.rope_theta = -10000"],
    );

    let place = with_model();
    place.file("model/config.json", b"{\"model_type\": \"\xff\"}");
    train(&place).fails(4, &["cannot read model/config.json", "UTF-8", HINT]);
}

#[test]
fn weights_that_do_not_fit() {
    let place = with_model();
    let config = place.text("model/config.json");
    let with = |from: &str, to: &str| place.file("model/config.json", config.replacen(from, to, 1));
    with("\"hidden_size\": 32", "\"hidden_size\": 64");
    let shape = "`model.embed_tokens.weight` has shape [256, 32]; the model needs [256, 64]";
    train(&place).fails(4, &["model", shape, HINT]);
    assert_eq!(Metrics::read(&place, "run").end_reason(), "failed");
    with("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3");
    place
        .trainer("--init-from model --seq 32 --out other")
        .fails(4, &["`model.layers.2.", "is missing", HINT]);
    with("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1");
    place
        .trainer("--init-from model --seq 32 --out third")
        .fails(4, &["`model.layers.1.", "is not one of the model's", HINT]);
}

#[test]
fn weights_that_are_damaged() {
    let place = with_model();
    let sound = std::fs::read(place.path("model/model.safetensors")).unwrap();
    let cases: [&[u8]; 4] = [
        &[],
        b"these are no weights",
        &sound[..100],
        &sound[..sound.len() - 1],
    ];
    for (index, damaged) in cases.into_iter().enumerate() {
        place.file("model/model.safetensors", damaged);
        place
            .trainer(&format!("--init-from model --seq 32 --out run-{index}"))
            .fails(4, &["model/model.safetensors", HINT]);
    }
    std::fs::remove_file(place.path("model/model.safetensors")).unwrap();
    train(&place).fails(4, &["`model` has neither `model.safetensors`", HINT]);
}

#[test]
fn a_damaged_index_of_shards() {
    let place = with_model();
    std::fs::remove_file(place.path("model/model.safetensors")).unwrap();
    let index = "model/model.safetensors.index.json";
    for (number, (text, word)) in [
        ("{", index),
        (
            "{\"weight_map\": {}}",
            "`model.embed_tokens.weight` is missing",
        ),
        (
            "{\"weight_map\": {\"a\": \"gone.safetensors\"}}",
            "model/gone.safetensors",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        place.file(index, text);
        place
            .trainer(&format!("--init-from model --seq 32 --out run-{number}"))
            .fails(4, &[word, HINT]);
    }
}
