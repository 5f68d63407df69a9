//! `export`, and what goes out with a model.

use crate::ranks::job::{train, train_alone};
use crate::workplace::Workplace;
use files::TensorFiles;
use pictures::{BESIDE, PROCESSOR, wrapped};
use safetensors::Dtype;
use serde_json::Value;
use std::collections::BTreeMap;

#[path = "../golden/pictures.rs"]
mod pictures;

/// Files that come with a model, and what is in them.
const COMPANIONS: [(&str, &str); 4] = [
    ("tokenizer.json", "{\"added_tokens\": []}"),
    ("tokenizer_config.json", "{}"),
    ("chat_template.jinja", "{{ messages }}\n"),
    ("generation_config.json", "{\"temperature\": 0.7}"),
];

/// A workplace with a model that came from elsewhere: keys and files that this trainer knows nothing of.
fn with_model() -> Workplace {
    let place = Workplace::new();
    place
        .trainer("init --config small.toml --out model")
        .succeeds();
    let config = place.text("model/config.json").replace(
        "{\n",
        "{\n  \"_name_or_path\": \"somebody/some-model\",\n  \"unheard_of\": {\"deep\": [1, null]},\n",
    );
    place.file("model/config.json", config);
    for (name, text) in COMPANIONS {
        place.file(&format!("model/{name}"), text);
    }
    place
}

fn config(place: &Workplace, folder: &str) -> Value {
    serde_json::from_str(&place.text(&format!("{folder}/config.json"))).unwrap()
}

#[track_caller]
fn assert_companions(place: &Workplace, folder: &str) {
    for (name, text) in COMPANIONS {
        assert_eq!(place.text(&format!("{folder}/{name}")), text, "{folder}");
    }
}

fn weights(place: &Workplace, folder: &str) -> Vec<u8> {
    std::fs::read(place.path(folder).join("model.safetensors")).unwrap()
}

/// One command at a time writes a model into a folder; the other is refused, and says why.
#[test]
fn a_folder_that_another_command_writes_is_refused() {
    let place = with_model();
    place.folder("out");
    let lock = std::fs::File::create(place.path("out/.model.lock")).unwrap();
    lock.lock().unwrap();
    let train = "train --init-from model --seq 32 --steps 1 --set data.any_tokenizer=true --out run --save-final out";
    for (command, flag) in [
        ("init --config small.toml --out out", "--out"),
        ("export model --out out", "--out"),
        (train, "--save-final"),
    ] {
        let words = ["another trainer", "is writing into `out`", flag];
        place.trainer(command).fails(2, &words);
        assert_eq!(place.names("out"), [".model.lock"], "{command}");
    }
    drop(lock);
    place.trainer("export model --out out").succeeds();
    assert!(!place.names("out").contains(&".model.lock".into()));
}

/// A run on the CPU is in f32; a folder in bf16 that it began with stays so.
#[test]
fn a_folder_in_bf16_stays_in_bf16() {
    let place = Workplace::new();
    place
        .trainer("init --config small.toml --dtype bf16 --out model")
        .succeeds();
    let flags = "--seq 32 --set data.any_tokenizer=true --save-every 1 --dtype f32";
    place
        .trainer(&format!(
            "train --init-from model --steps 1 {flags} --out run"
        ))
        .succeeds();
    place
        .trainer(&format!(
            "train --resume run --steps 2 {flags} --out on --allow-change"
        ))
        .succeeds();
    for (run, dtype, kind) in [
        ("run", "", "bfloat16"),
        ("on", "", "bfloat16"),
        ("on", "--dtype f32", "float32"),
    ] {
        let out = format!("{run}-{kind}");
        place
            .trainer(&format!("export {run} {dtype} --out {out}"))
            .succeeds();
        assert_eq!(config(&place, &out)["torch_dtype"], kind);
        let size = weights(&place, &out).len() as f64 / weights(&place, "model").len() as f64;
        let expected = if kind == "float32" { 2.0 } else { 1.0 };
        assert!((size - expected).abs() < 0.1, "{out}: {size}");
    }
}

const TRAIN: &str = "train --init-from model --seq 32 --steps 2 --set data.any_tokenizer=true --save-every 1 --save-final final --out run";

#[test]
fn what_came_with_a_model_goes_out_with_it() {
    let place = with_model();
    place.trainer(TRAIN).succeeds();
    let outcome = place.trainer("export run --out exported").succeeds();
    assert!(
        outcome
            .stdout
            .contains("parameters of run/checkpoints/step-2 in exported"),
        "{outcome:?}"
    );
    place
        .trainer("export run/checkpoints/step-1 --out earlier")
        .succeeds();
    for folder in ["final", "run/checkpoints/step-2", "exported", "earlier"] {
        assert_companions(&place, folder);
        assert_eq!(
            place.text(&format!("{folder}/config.json")),
            place.text("model/config.json"),
            "{folder}"
        );
    }
    assert_eq!(weights(&place, "exported"), weights(&place, "final"));
    assert_ne!(weights(&place, "earlier"), weights(&place, "final"));
    // All of these are models to start from.
    for folder in ["final", "run/checkpoints/step-2", "exported"] {
        place
            .trainer(&format!(
                "train --init-from {folder} --seq 32 --steps 1 --set data.any_tokenizer=true --out {folder}-run"
            ))
            .succeeds();
    }
}

#[test]
fn shards_and_types() {
    let place = with_model();
    place
        .trainer("export model --out narrow --dtype bf16 --max-shard-size 30KB")
        .succeeds();
    assert_companions(&place, "narrow");
    let mut expected = config(&place, "model");
    expected["torch_dtype"] = "bfloat16".into();
    assert_eq!(config(&place, "narrow"), expected);
    let index: Value =
        serde_json::from_str(&place.text("narrow/model.safetensors.index.json")).unwrap();
    assert!(index["weight_map"].as_object().unwrap().len() > 10);
    // In bf16 as it is, and once more as one file of f32.
    place.trainer("export narrow --out same").succeeds();
    assert_eq!(config(&place, "same"), expected);
    place
        .trainer("export narrow --out wide --dtype f32")
        .succeeds();
    assert_eq!(config(&place, "wide"), config(&place, "model"));
    assert_eq!(
        weights(&place, "wide").len(),
        weights(&place, "model").len()
    );
    place
        .trainer("export wide --out again --dtype bf16")
        .succeeds();
    assert_eq!(
        weights(&place, "again"),
        weights(&place, "same"),
        "nothing is lost from bf16 to f32 and back"
    );
}

#[test]
fn what_cannot_be_exported_is_refused() {
    let place = with_model();
    for (command, code, words) in [
        (
            "export model --out model",
            2,
            ["model is not empty", "--out"],
        ),
        (
            "export model --out new --max-shard-size 50%",
            2,
            ["--max-shard-size 50%", "5GB"],
        ),
        ("export nowhere --out new", 4, ["nowhere", "No such file"]),
    ] {
        place.trainer(command).fails(code, &words);
        assert!(!place.path("new").exists(), "{command}");
    }
    place
        .trainer("export model --out new --dtype fp16")
        .fails(2, &["--dtype", "bf16"]);
}

/// A save that was cut short is passed over, a model that was is refused.
#[test]
fn what_is_not_whole() {
    let place = with_model();
    place.trainer(TRAIN).succeeds();
    std::fs::remove_file(place.path("run/checkpoints/step-2/manifest.json")).unwrap();
    let outcome = place.trainer("export run --out exported").succeeds();
    assert!(
        outcome.stderr.contains("an earlier one is taken") && outcome.stderr.contains("step-2"),
        "{outcome:?}"
    );
    assert!(outcome.stdout.contains("step-1"), "{outcome:?}");
    let whole = weights(&place, "run/checkpoints/step-1");
    place.file("run/checkpoints/step-1/model.safetensors", &whole[1..]);
    place
        .trainer("export run/checkpoints/step-1 --out other")
        .fails(4, &["step-1", "model.safetensors"]);
}

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn tensors(place: &Workplace, folder: &str) -> Tensors {
    let files = TensorFiles::open_folder(&place.path(folder), "model").unwrap();
    let owned = files.iter().map(|(name, tensor)| {
        let bytes = tensor.bytes.get(0..tensor.bytes.len()).unwrap();
        let tensor = (tensor.dtype, tensor.shape.to_vec(), bytes.into_owned());
        (name.to_string(), tensor)
    });
    owned.collect()
}

/// A workplace with a folder of Qwen3.5 in `model`.
fn with_pictures() -> Workplace {
    let place = Workplace::new();
    let batches = pictures::write(&place.path("model"));
    place.file("batches.safetensors", batches);
    place
}

const OF_PICTURES: &str =
    "--data batches.safetensors --set data.any_tokenizer=true --seq 70 --micro-batch 2 --lr 0.01";

/// Holds a folder to be the model's, with what was trained in its text part, whose tensors are those of `text`.
#[track_caller]
fn assert_whole(place: &Workplace, folder: &str, text: &str) {
    let (mut written, before) = (tensors(place, folder), tensors(place, "model"));
    assert!(written.keys().eq(before.keys()), "{folder}");
    assert_ne!(written, before, "{folder}: it was trained");
    for (name, dtype, shape, bytes) in BESIDE {
        let tensor = written.remove(name).unwrap();
        assert_eq!(tensor, (dtype, shape.to_vec(), bytes.to_vec()), "{folder}");
    }
    let text = tensors(place, text).into_iter();
    let text: Tensors = text.map(|(name, it)| (wrapped(&name), it)).collect();
    assert_eq!(written, text, "{folder}");
    assert_eq!(config(place, folder), config(place, "model"), "{folder}");
    let (name, processor) = PROCESSOR;
    assert_eq!(place.text(&format!("{folder}/{name}")), processor);
}

#[track_caller]
fn loss(place: &Workplace, model: &str) -> Value {
    let eval = format!(
        "eval {model} --json --data batches.safetensors --seq 70 --set data.any_tokenizer=true"
    );
    let record = place.trainer(&eval).succeeds().stdout;
    serde_json::from_str::<Value>(&record).unwrap()["loss"].clone()
}

#[test]
fn what_a_folder_has_beside_its_text_part_is_exported_with_it() {
    let place = with_pictures();
    let train = format!("train {OF_PICTURES} --save-every 1");
    let first = format!("{train} --init-from model --steps 1 --save-final final --out run");
    let told = place.trainer(&first).succeeds().stderr;
    assert!(told.contains("an export copies them from here"), "{told}");
    place.trainer("export run --out exported").succeeds();
    let shards = "export run --out shards --max-shard-size 10KB";
    place.trainer(shards).succeeds();
    assert!(place.names("shards").len() > 5);
    const STEP: &str = "run/checkpoints/step-1";
    for folder in ["final", "exported", "shards"] {
        assert_whole(&place, folder, STEP);
        assert_eq!(loss(&place, folder), loss(&place, STEP), "{folder}");
    }
    assert_ne!(loss(&place, "model"), loss(&place, STEP));

    // A run that goes on, and one that starts from a checkpoint, lead to the same folder.
    let resumed = format!("{train} --resume run --steps 2 --out on --allow-change");
    place.trainer(&resumed).succeeds();
    place.trainer("export on --out from-on").succeeds();
    assert_whole(&place, "from-on", "on/checkpoints/step-2");
    let again = format!("{train} --init-from {STEP} --steps 1 --save-final again --out anew");
    place.trainer(&again).succeeds();
    assert_whole(&place, "again", "anew/checkpoints/step-1");

    let narrow = "export exported --dtype bf16 --out narrow";
    place.trainer(narrow).succeeds();
    let (written, whole) = (tensors(&place, "narrow"), config(&place, "narrow"));
    for (name, dtype, ..) in BESIDE {
        assert_eq!(written[name].0, dtype);
    }
    let types = [&whole["dtype"], &whole["text_config"]["dtype"]];
    assert_eq!(types, ["bfloat16"; 2]);
}

/// Ranks gather the text part in the order in which it is written, whatever follows it.
#[test]
fn ranks_write_the_whole_folder() {
    let place = with_pictures();
    let way = format!("{OF_PICTURES} --init-from model --steps 1 --save-every 1 --zero 3");
    let alone = train_alone(&place, &way, "alone");
    let ranks = train(&place, 2, &way, "ranks");
    assert!(ranks.weights == alone.weights);
    place.trainer("export ranks --out exported").succeeds();
    for folder in ["ranks/model", "exported"] {
        assert_whole(&place, folder, "alone/checkpoints/step-1");
    }
}

#[test]
fn adapters_are_merged_into_the_whole_folder() {
    let place = with_pictures();
    let train = format!("train {OF_PICTURES} --init-from model --lora 2 --steps 1 --out run");
    let train = format!("{train} --save-final adapter");
    place.trainer(&train).succeeds();
    let merge = "export adapter --merge --out merged";
    place.trainer(merge).succeeds();
    let before = tensors(&place, "model");
    let text = |name: &str| name.starts_with("model.language_model.");
    let written = tensors(&place, "merged");
    assert!(written.keys().eq(before.keys()));
    assert_ne!(written, before);
    for (name, tensor) in &before {
        assert!(text(name) || written[name] == *tensor, "{name}");
    }
    assert_eq!(config(&place, "merged"), config(&place, "model"));
}

/// A folder that moved, and one that lost its part for pictures.
#[test]
fn a_text_part_whose_folder_is_gone_is_exported_alone() {
    let place = with_pictures();
    let train = format!("train {OF_PICTURES} --init-from model --steps 1 --save-every 1 --out run");
    place.trainer(&train).succeeds();
    std::fs::rename(place.path("model"), place.path("moved")).unwrap();
    let gone = place.trainer("export run --out gone").succeeds().stderr;
    std::fs::rename(place.path("gone"), place.path("model")).unwrap();
    let lost = place.trainer("export run --out lost").succeeds().stderr;
    std::fs::rename(place.path("model"), place.path("gone")).unwrap();
    for (folder, told) in [("gone", gone), ("lost", lost)] {
        let base = place.path("model").display().to_string();
        for word in ["written alone", "`model.visual.*`", "`mtp.*`", &base] {
            assert!(told.contains(word), "{word}: {told}");
        }
        let text = "run/checkpoints/step-1";
        assert_eq!(tensors(&place, folder), tensors(&place, text));
        assert_eq!(config(&place, folder)["model_type"], "qwen3_5_text");
        assert!(!place.names(folder).contains(&PROCESSOR.0.into()));
        let (own, trained) = (loss(&place, folder), loss(&place, text));
        assert_eq!(own, trained, "{folder}");
    }
}
