//! `--init-from` a folder that transformers saved in NF4 (`benches/peers/quantised_folders.py`), and adapters on bases of every kind.

use crate::workplace::Workplace;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::path::Path;

/// A workplace with a model in `base`, and batches for it.
fn with(folder: &str) -> Workplace {
    let place = Workplace::new();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let family = folder.rsplit('/').next().unwrap();
    place.folder("base");
    for entry in std::fs::read_dir(golden.join(folder)).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if name.starts_with("model") && !name.contains("final") || name == "config.json" {
            place.file(
                &format!("base/{name}"),
                std::fs::read(entry.path()).unwrap(),
            );
        }
    }
    let batches = golden
        .join("transformers")
        .join(family)
        .join("batches.safetensors");
    place.file("batches.safetensors", std::fs::read(batches).unwrap());
    place
}

const DATA: &str = "--data batches.safetensors --no-shuffle --micro-batch 2 --seq 19";

fn train(rest: &str) -> String {
    format!("train --init-from base --lora 2 --lr 0.01 --quiet {DATA} {rest}")
}

fn eval(place: &Workplace, model: &str) -> f64 {
    let command = format!("eval {model} --json --data batches.safetensors --seq 19");
    let outcome = place.trainer(&command).succeeds();
    let record: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(record["peak_bytes"], record["planned_peak_bytes"]);
    record["loss"].as_f64().unwrap()
}

fn json_of(place: &Workplace, file: &str) -> Value {
    serde_json::from_str(&place.text(file)).unwrap()
}

#[track_caller]
fn near(one: f64, other: f64) {
    assert!((one - other).abs() < 1e-5, "{one} {other}");
}

#[test]
fn adapters_on_a_folder_in_nf4_go_out_and_come_in() {
    let place = with("quantised/llama");
    let words: serde_json::Map<String, Value> =
        (0..53).map(|id| (format!("w{id}"), json!(id))).collect();
    let model = json!({"type": "WordLevel", "vocab": words, "unk_token": "w0"});
    let tokenizer = json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null, "model": model});
    place.file("base/tokenizer.json", tokenizer.to_string());
    let steps =
        "--set data.any_tokenizer=true --save-every 2 --steps 4 --save-final adapter --out run";
    place.trainer(&train(steps)).succeeds();
    let known = json_of(&place, "adapter/base.json");
    assert_eq!(known["codes"], json!(["nf4", "f32"]));
    let config = json_of(&place, "adapter/config.json");
    assert_eq!(config["quantization_config"], Value::Null);

    // The folder alone, with its values in f32; adapters on it; both in one model again.
    let base = eval(&place, "base");
    let adapted = eval(&place, "adapter");
    assert!(adapted < base - 0.01, "{adapted} {base}");
    assert_eq!(eval(&place, "run"), adapted);
    place.trainer("export run --merge --out merged").succeeds();
    near(eval(&place, "merged"), adapted);
    place.trainer("export base --out plain").succeeds();
    assert_eq!(eval(&place, "plain"), base);
    place
        .trainer("generate adapter --prompt w5 --max-tokens 3 --temperature 0")
        .succeeds();

    // Resumed, to the bit, and with a base that has moved or changed.
    place
        .trainer("train --resume run/checkpoints/step-2 --quiet --save-final rest --out rest-run")
        .succeeds();
    let factors =
        |folder: &str| std::fs::read(place.path(folder).join("adapter_model.safetensors"));
    assert_eq!(factors("adapter").unwrap(), factors("rest").unwrap());
    place
        .trainer("eval adapter --base plain --data batches.safetensors --seq 19")
        .fails(4, &["trained on another model"]);

    // A folder without `base.json`, as PEFT writes it, takes what the model's folder says.
    std::fs::remove_file(place.path("adapter/base.json")).unwrap();
    std::fs::remove_file(place.path("adapter/config.json")).unwrap();
    assert_eq!(eval(&place, "adapter --base base"), adapted);
}

#[test]
fn a_folder_in_nf4_is_for_adapters_and_stays_as_it_is() {
    let place = with("quantised/llama");
    let plan = |flags: &str| format!("plan --json --device cpu --init-from base --seq 19 {flags}");
    let plan_of = |flags: &str| -> Value {
        let outcome = place.trainer(&plan(flags)).succeeds();
        serde_json::from_str(&outcome.stdout).unwrap()
    };
    let [unset, same] = ["--lora 2", "--lora 2 --base-dtype nf4"].map(plan_of);
    assert!(unset["freeze"]["stored_bytes"]["nf4"].as_u64() > Some(0));
    assert_eq!(unset["peak_bytes"], same["peak_bytes"]);
    let refusals = [
        ("", &["base are nf4", "--lora RANK", "bf16 or f32"][..]),
        (
            "--lora 2 --base-dtype 8bit",
            &["--base-dtype 8bit", "weights are nf4"],
        ),
        (
            "--lora 2 --set lora.base_skip=[\"(\"]",
            &["`(` in lora.base_skip", "q_proj"],
        ),
    ];
    for (flags, words) in refusals {
        place.trainer(&plan(flags)).fails(2, words);
    }
    let config = json_of(&place, "base/config.json");
    for (key, value, word) in [
        ("load_in_8bit", json!(true), "LLM.int8"),
        ("bnb_4bit_quant_type", json!("fp4"), "fp4"),
        ("quant_method", json!("gptq"), "gptq"),
    ] {
        let mut other = config.clone();
        other["quantization_config"][key] = value;
        place.file("base/config.json", other.to_string());
        place
            .trainer(&plan("--lora 2"))
            .fails(4, &["base/config.json", word, "bf16 or f32"]);
    }
}

/// Under adapters experts keep their codes; what is widened is what transformers widens, to the bit.
#[test]
fn experts_in_mxfp4_are_kept_under_adapters_and_widened_without() {
    let place = with("transformers/gpt_oss_mxfp4");
    let plan = |flags: &str| format!("plan --json --device cpu --init-from base --seq 19 {flags}");
    let plan_of = |flags: &str| -> Value {
        let outcome = place.trainer(&plan(flags)).succeeds();
        serde_json::from_str(&outcome.stdout).unwrap()
    };
    let [unset, same] = ["--lora 2", "--lora 2 --base-dtype mxfp4"].map(plan_of);
    assert!(unset["freeze"]["stored_bytes"]["mxfp4"].as_u64() > Some(0));
    assert_eq!(unset["peak_bytes"], same["peak_bytes"]);
    for other in ["nf4", "8bit"] {
        let flags = format!("--lora 2 --base-dtype {other}");
        place.trainer(&plan(&flags)).fails(2, &["mxfp4"]);
    }

    let base = eval(&place, "base");
    let steps = "--steps 4 --save-final adapter --out run";
    place.trainer(&train(steps)).succeeds();
    assert!(eval(&place, "adapter") < base - 0.01);
    let whole = "train --init-from base --lr 0.01 --quiet --steps 4 --save-final whole --out all";
    place.trainer(&format!("{whole} {DATA}")).succeeds();
    assert!(eval(&place, "whole") < base - 0.01);
    let config = json_of(&place, "whole/config.json");
    assert_eq!(config["quantization_config"], Value::Null);

    place
        .trainer("export base --dtype bf16 --out plain")
        .succeeds();
    let golden = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/golden/transformers/gpt_oss_mxfp4"
    );
    let widened = std::fs::read(Path::new(golden).join("widened.safetensors")).unwrap();
    let plain = std::fs::read(place.path("plain/model.safetensors")).unwrap();
    let [widened, plain] = [&widened, &plain].map(|bytes| SafeTensors::deserialize(bytes).unwrap());
    for (name, tensor) in widened.tensors() {
        let own = plain.tensor(&name).unwrap();
        assert_eq!(own.shape(), tensor.shape(), "{name}");
        assert!(own.data() == tensor.data(), "{name}");
    }
}

/// GPT-2 stores its matrices transposed, but not their codes; some modules of this folder are no codes.
#[test]
fn adapters_on_gpt2_are_merged_into_every_kind_of_base() {
    let runs = [
        ("quantised/gpt2", ""),
        ("transformers/gpt2", "--base-dtype nf4"),
        ("transformers/gpt2", "--base-dtype 8bit"),
        (
            "transformers/gpt2",
            "--base-dtype nf4 --set lora.base_skip=[\"mlp.c_fc\"]",
        ),
        ("transformers/llama", "--base-dtype 8bit"),
    ];
    let mut losses = Vec::new();
    for (folder, flags) in runs {
        let place = with(folder);
        let steps = format!("{flags} --steps 3 --save-final adapter --out run");
        place.trainer(&train(&steps)).succeeds();
        let known = json_of(&place, "adapter/base.json");
        assert_eq!(
            known["skip"].is_null(),
            !folder.starts_with("q") && !flags.contains("skip")
        );
        let adapted = eval(&place, "adapter");
        place
            .trainer("export adapter --merge --out merged")
            .succeeds();
        near(eval(&place, "merged"), adapted);
        assert!(
            (eval(&place, "base") - adapted).abs() > 1e-3,
            "{folder} {flags}"
        );
        losses.push(adapted);
    }
    let mut apart = losses.clone();
    apart.dedup();
    assert_eq!(apart, losses, "every base has other values");
}

/// What the shapes of adapters follow from stays as it was; the rest may change.
#[test]
fn a_resumed_run_keeps_the_shapes_of_its_adapters() {
    let place = with("transformers/llama");
    place
        .trainer(&train(
            "--steps 2 --save-every 1 --save-final first --out run",
        ))
        .succeeds();
    let resume = "train --resume run/checkpoints/step-1 --quiet --allow-change --save-final last --out again";
    for (set, key) in [
        ("lora.rank=4", "lora.rank: 2 before, 4 now"),
        ("lora.targets=[\"q_proj\"]", "lora.targets"),
        ("lora.layers=[1]", "lora.layers"),
        ("lora.rank_pattern={q_proj=1}", "lora.rank_pattern"),
    ] {
        let outcome = place.trainer(&format!("{resume} --set {set}"));
        outcome.fails(2, &[key, "begin a new run"]);
        assert!(!place.path("again").exists());
    }
    let changed = "--set lora.alpha=8 --set lora.dropout=0.5 --base-dtype nf4";
    place.trainer(&format!("{resume} {changed}")).succeeds();
    assert_eq!(
        json_of(&place, "last/base.json")["codes"],
        json!(["nf4", "f32"])
    );
    assert_eq!(json_of(&place, "last/adapter_config.json")["lora_alpha"], 8);
    assert!((eval(&place, "last") - eval(&place, "first")).abs() > 1e-3);
}

/// Patterns of ranks count in the order of their file, into a run's configuration and out again.
#[test]
fn patterns_keep_their_order() {
    let place = with("transformers/llama");
    let toml = "[lora]\nrank = 4\n[lora.rank_pattern]\n\"v_proj\" = 1\n\"1.self_attn.v_proj\" = 2\n\"o_proj\" = 3\n";
    place.file("lora.toml", toml);
    let command = format!("train --config lora.toml --init-from base --quiet {DATA} --steps 1");
    place
        .trainer(&format!("{command} --save-final adapter --out run"))
        .succeeds();
    let order = |config: &Value| -> Vec<String> {
        let patterns = config["rank_pattern"].as_object().unwrap();
        patterns.keys().cloned().collect()
    };
    let written = json_of(&place, "adapter/adapter_config.json");
    assert_eq!(order(&written), ["v_proj", "1.self_attn.v_proj", "o_proj"]);
    let again =
        format!("train --lora-from adapter --quiet {DATA} --steps 1 --save-final more --out on");
    place.trainer(&again).succeeds();
    assert_eq!(
        order(&json_of(&place, "more/adapter_config.json")),
        order(&written)
    );
}
