//! `--lora`: adapters from a fresh start or a folder, into checkpoints and folders, and merged into their model.

use crate::workplace::Workplace;
use serde_json::Value;

#[path = "../golden/transformers/families.rs"]
mod families;

/// A workplace with a model in a folder.
fn with_model() -> Workplace {
    let place = Workplace::new();
    place
        .trainer("init --config small.toml --out model")
        .succeeds();
    place
}

const TRAIN: &str = "train --init-from model --seq 32 --lora 4 --lr 0.01 --set data.any_tokenizer=true --micro-batch 2";

fn eval(place: &Workplace, arguments: &str) -> f64 {
    let outcome = place.trainer(&format!(
        "eval {arguments} --json --data small.toml --seq 32"
    ));
    let record: Value = serde_json::from_str(&outcome.succeeds().stdout).unwrap();
    assert_eq!(record["peak_bytes"], record["planned_peak_bytes"]);
    record["loss"].as_f64().unwrap()
}

fn bytes(place: &Workplace, file: &str) -> Vec<u8> {
    std::fs::read(place.path(file)).unwrap()
}

#[test]
fn adapters_go_out_come_in_and_are_merged() {
    let place = with_model();
    place
        .trainer(&format!(
            "{TRAIN} --steps 6 --save-every 3 --save-final adapter --out run"
        ))
        .succeeds();
    let names = place.names("adapter");
    assert!(
        names.contains(&"adapter_model.safetensors".into()),
        "{names:?}"
    );
    assert!(!names.contains(&"model.safetensors".into()), "{names:?}");
    assert!(
        !place
            .names("run/checkpoints/step-6")
            .contains(&"model.safetensors".into())
    );
    let config: Value = serde_json::from_str(&place.text("adapter/adapter_config.json")).unwrap();
    assert_eq!(config["r"], 4);
    assert!(
        config["base_model_name_or_path"]
            .as_str()
            .unwrap()
            .ends_with("model")
    );

    let base = eval(&place, "model");
    let adapted = eval(&place, "adapter");
    assert!(adapted < base - 0.01, "{adapted} {base}");
    assert_eq!(adapted, eval(&place, "run"));
    place.trainer("export run --merge --out merged").succeeds();
    let merged = eval(&place, "merged");
    assert!((merged - adapted).abs() < 1e-5, "{merged} {adapted}");
    place
        .trainer("export adapter --merge --dtype bf16 --out narrow")
        .succeeds();
    assert!((eval(&place, "narrow") - adapted).abs() < 1e-2);
    place.trainer("export run --out copied").succeeds();
    assert_eq!(place.names("copied"), names);
    for name in &names {
        let [copied, own] =
            ["copied", "adapter"].map(|folder| bytes(&place, &format!("{folder}/{name}")));
        assert!(copied == own, "{name}");
    }
    place
        .trainer("generate adapter --prompt a --max-tokens 4 --temperature 0")
        .succeeds();

    // Resumed, and going on from a folder.
    place
        .trainer(&format!("{TRAIN} --steps 3 --save-final half --out first"))
        .succeeds();
    place
        .trainer("train --resume first --steps 6 --save-final rest")
        .succeeds();
    let file = "adapter_model.safetensors";
    let whole = bytes(&place, &format!("adapter/{file}"));
    assert_eq!(whole, bytes(&place, &format!("rest/{file}")));
    assert_ne!(whole, bytes(&place, &format!("half/{file}")));
    let from = "train --lora-from half --seq 32 --steps 1 --set data.any_tokenizer=true --save-final more --out on";
    place.trainer(from).succeeds();
    assert!(eval(&place, "more") < base);
    place
        .trainer("train --lora-from half --lora 4 --set lora.alpha=64 --out off")
        .fails(2, &["lora.alpha is set", "another value"]);
    place
        .trainer("train --lora-from model --out off")
        .fails(4, &["adapter_config.json", "a folder of adapters has"]);

    // Another model under the same adapters.
    place
        .trainer("init --config small.toml --seed 9 --out other")
        .succeeds();
    let words = ["other cannot be used", "trained on another model"];
    let outcome = place.trainer("eval adapter --base other --data small.toml");
    outcome.fails(4, &words);
    let from = "train --lora-from adapter --init-from other --seq 32 --steps 1 --set data.any_tokenizer=true --out on-other";
    place.trainer(from).fails(4, &words);
    place.file("adapter/base.json", "{");
    let outcome = place.trainer("eval adapter --base other --data small.toml");
    outcome.fails(4, &["base.json"]);
}

/// Folders that transformers wrote: adapters on them are merged into a folder of the same family, which is read again.
#[test]
fn adapters_on_a_folder_of_each_family_are_merged() {
    let place = Workplace::new();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/transformers");
    for family in families::FAMILIES {
        let folder = format!("{golden}/{family}");
        let reference = place.text(&format!("{folder}/reference.json"));
        let seq = serde_json::from_str::<Value>(&reference).unwrap()["seq"].clone();
        let data = format!(
            "--data {folder}/batches.safetensors --set data.any_tokenizer=true --seq {seq}"
        );
        let train = format!(
            "train --init-from {folder} {data} --micro-batch 2 --lora 2 --lr 0.05 --steps 3"
        );
        let [adapter, merged] = ["adapter", "merged"].map(|kind| format!("{family}-{kind}"));
        let train = format!("{train} --save-final {adapter} --out {family}-run");
        place.trainer(&train).succeeds();
        let export = format!("export {adapter} --merge --out {merged}");
        place.trainer(&export).succeeds();
        let [base, adapted, merged_loss] = [&folder, &adapter, &merged].map(|model| {
            let eval = format!("eval {model} {data} --json");
            let told = place.trainer(&eval).succeeds().stdout;
            let record: Value = serde_json::from_str(&told).unwrap();
            record["loss"].as_f64().unwrap()
        });
        assert!((adapted - base).abs() > 1e-3, "{family}: {adapted} {base}");
        let off = (merged_loss - adapted).abs();
        assert!(off < 1e-5, "{family}: {merged_loss} {adapted}");
        let [own, written] = [&folder, &merged].map(|model| {
            let text = place.text(&format!("{model}/config.json"));
            serde_json::from_str::<Value>(&text).unwrap()["model_type"].clone()
        });
        assert_eq!(own, written, "{family}");
    }
}

/// The values of codes of experts, which have one scale for several tensors of files, are those of the merged model, and so is
/// what adapters add to experts.
#[test]
fn experts_in_four_bits_and_with_adapters_are_merged() {
    let place = Workplace::new();
    let experts =
        "[model.experts]\ncount = 3\nchosen = 2\nffn = 20\nshared_ffn = 24\nshared_gate = true\n";
    let model = place.text("small.toml");
    let model = model.replace("[model]", "[model]\nqkv_bias = true");
    place.file("moe.toml", format!("{model}{experts}"));
    let init = "init --config moe.toml --out model";
    place.trainer(init).succeeds();
    let base = eval(&place, "model");
    let targets =
        "--set lora.targets=[\"o_proj\",\"mlp.experts.gate_up_proj\",\"experts.down_proj\"]";
    for (number, flags) in ["--base-dtype nf4", targets].into_iter().enumerate() {
        let train = format!("{TRAIN} {flags} --steps 4 --save-every 2");
        let [adapter, run] = ["adapter", "run"].map(|name| format!("{name}-{number}"));
        let train = format!("{train} --save-final {adapter} --out {run}");
        place.trainer(&train).succeeds();
        let adapted = eval(&place, &adapter);
        assert!((adapted - base).abs() > 1e-3, "{flags}");
        assert_eq!(adapted, eval(&place, &run), "{flags}");
        for (dtype, tolerance) in [("f32 --max-shard-size 10KB", 1e-5), ("bf16", 1e-2)] {
            let merged = format!("merged-{number}-{tolerance}");
            let export = format!("export {adapter} --merge --dtype {dtype} --out {merged}");
            place.trainer(&export).succeeds();
            let merged = eval(&place, &merged);
            assert!((merged - adapted).abs() < tolerance, "{merged} {adapted}");
        }
        let resume = format!(
            "train --resume {run}/checkpoints/step-2 --save-final rest-{number} --out on-{number}"
        );
        place.trainer(&resume).succeeds();
        let file = "adapter_model.safetensors";
        let whole = bytes(&place, &format!("{adapter}/{file}"));
        assert_eq!(whole, bytes(&place, &format!("rest-{number}/{file}")));
    }
    let config: Value = serde_json::from_str(&place.text("adapter-1/adapter_config.json")).unwrap();
    let named = serde_json::json!(["experts.down_proj", "experts.gate_up_proj"]);
    assert_eq!(config["target_parameters"], named);
    assert_eq!(config["target_modules"], serde_json::json!(["o_proj"]));
    place
        .trainer(&format!(
            "plan --config moe.toml --lora 4 {targets} --set lora.dropout=0.1"
        ))
        .fails(2, &["lora.dropout", "mlp.experts.gate_up_proj"]);
    place
        .trainer(&format!("plan --config small.toml --lora 4 {targets}"))
        .fails(2, &["`mlp.experts.gate_up_proj` in lora.targets"]);
}

/// A model in 4 bits: folders of adapters say so, and what evaluates or merges them has its values.
#[test]
fn adapters_on_a_model_in_four_bits_go_out_and_come_in() {
    let place = with_model();
    let train = format!("{TRAIN} --base-dtype nf4 --save-every 3 --save-final");
    place
        .trainer(&format!("{train} adapter --steps 6 --out run"))
        .succeeds();
    let base: Value = serde_json::from_str(&place.text("adapter/base.json")).unwrap();
    assert_eq!(base["codes"], serde_json::json!(["nf4", "f32"]));
    let adapted = eval(&place, "adapter");
    assert_eq!(adapted, eval(&place, "run"));
    let mut whole = base.clone();
    whole.as_object_mut().unwrap().remove("codes");
    place.file("adapter/base.json", whole.to_string());
    assert!((adapted - eval(&place, "adapter")).abs() > 1e-4);
    place.file("adapter/base.json", base.to_string());
    place.trainer("export run --merge --out merged").succeeds();
    let merged = eval(&place, "merged");
    assert!((merged - adapted).abs() < 1e-5, "{merged} {adapted}");
    place
        .trainer("generate adapter --prompt a --max-tokens 4 --temperature 0")
        .succeeds();
    place
        .trainer("train --resume run/checkpoints/step-3 --save-final rest --out rest-run")
        .succeeds();
    let file = "adapter_model.safetensors";
    let whole = bytes(&place, &format!("adapter/{file}"));
    assert_eq!(whole, bytes(&place, &format!("rest/{file}")));
    let rest = "train --resume run/checkpoints/step-3 --offload-parameters pinned --eval-every 1 --eval-data small.toml";
    place
        .trainer(&format!("{rest} --save-final streamed --out streamed-run"))
        .succeeds();
    assert_eq!(whole, bytes(&place, &format!("streamed/{file}")));
    let evaluated = place.text("streamed-run/metrics.jsonl");
    assert_eq!(evaluated.matches("\"kind\":\"eval\"").count(), 3);
    assert_eq!(adapted, eval(&place, "streamed-run"));
    place
        .trainer("export streamed-run --merge --out merged-streamed")
        .succeeds();
    assert_eq!(merged, eval(&place, "merged-streamed"));
    let on = "train --lora-from adapter --base-dtype 8bit --seq 32 --steps 1 --set data.any_tokenizer=true --save-final more --out on";
    place.trainer(on).succeeds();
    let codes = &serde_json::from_str::<Value>(&place.text("more/base.json")).unwrap()["codes"];
    assert_eq!(*codes, serde_json::json!(["8bit", "f32"]));
    let plan = place.trainer("plan --json --config small.toml --lora 4 --base-dtype nf4");
    let plan: Value = serde_json::from_str(&plan.succeeds().stdout).unwrap();
    let stored = &plan["freeze"]["stored_bytes"];
    assert!(stored["nf4"].as_u64() > Some(0) && stored["f32"].as_u64() > Some(0));
}

/// A fresh model under adapters is made again of its seed.
#[test]
fn adapters_of_a_fresh_model_know_their_seed() {
    let place = Workplace::new();
    let train = "train --config small.toml --lora 2 --seed 5 --lr 0.01";
    place
        .trainer(&format!("{train} --steps 2 --save-every 1 --out run"))
        .succeeds();
    place
        .trainer("train --resume run/checkpoints/step-1 --save-final last --out again")
        .succeeds();
    let file = "adapter_model.safetensors";
    let last = bytes(&place, &format!("run/checkpoints/step-2/{file}"));
    assert_eq!(last, bytes(&place, &format!("last/{file}")));
    let fresh = eval(&place, "run");
    place
        .trainer("init --config small.toml --seed 5 --dtype f32 --out model")
        .succeeds();
    assert_eq!(eval(&place, "run --base model"), fresh);
    place
        .trainer("init --config small.toml --seed 5 --dtype bf16 --out narrow")
        .succeeds();
    assert!((eval(&place, "run --base narrow") - fresh).abs() < 1e-2);
    place
        .trainer("init --config small.toml --seed 6 --dtype f32 --out other")
        .succeeds();
    let words = ["other cannot be used", "a fresh one of seed 5"];
    place
        .trainer("eval run --base other --data small.toml --seq 32")
        .fails(4, &words);
    place
        .trainer("export run --merge --base other --out off")
        .fails(4, &words);
    place
        .trainer("train --resume run/checkpoints/step-1 --init-from model --out moved")
        .fails(2, &["leave --init-from model out"]);
    place
        .trainer("export run --merge --out merged")
        .fails(2, &["trainer init", "--base DIR"]);
    place
        .trainer("export run --merge --base model --out merged")
        .succeeds();
    assert!((eval(&place, "merged") - fresh).abs() < 1e-5);
}

#[test]
fn what_makes_no_sense_or_is_not_built_is_refused() {
    let place = with_model();
    for (flags, words) in [
        ("--lora 0", &["in --lora 0", "at least 1"][..]),
        ("--lora 33", &["rank 33", "32 by 32", "at most"]),
        (
            "--lora 4 --set lora.targets=[\"qq_proj\"]",
            &["`qq_proj` in lora.targets", "q_proj"],
        ),
        (
            "--lora 4 --set lora.targets=[]",
            &["nothing is left to train"],
        ),
        ("--lora 4 --set lora.layers=[7]", &["block 7", "0 to 1"]),
        (
            "--lora 4 --set train.freeze=[\"*norm*\"]",
            &["train.freeze", "leave one of the two out"],
        ),
        ("--base-dtype nf4", &["lora.base_dtype", "--lora RANK"]),
        ("--set lora.alpha=3", &["`lora.alpha`", "--lora RANK"]),
    ] {
        let command = format!("plan --config small.toml {flags}");
        place.trainer(&command).fails(2, words);
    }
    place
        .trainer("plan --config deepseek-v3 --lora 4")
        .fails(2, &["the frozen model", "optim.router_bias_rate=0"]);
    place.folder("strange");
    let config = r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], "use_dora": true}"#;
    place.file("strange/adapter_config.json", config);
    place
        .trainer("plan --lora-from strange --init-from model")
        .fails(4, &["`use_dora` is true", "not built"]);
}

/// The plan says what freezing saves, and keeps no more of the adapters than what they need.
#[test]
fn the_plan_says_what_adapters_save() {
    let place = Workplace::new();
    let plan = |flags: &str| -> Value {
        let plan = place.trainer(&format!(
            "plan --json --config small.toml --device cpu {flags}"
        ));
        serde_json::from_str(&plan.succeeds().stdout).unwrap()
    };
    let [all, adapted] = ["", "--lora 4"].map(plan);
    assert!(adapted["peak_bytes"].as_u64() < all["peak_bytes"].as_u64());
    assert!(adapted["freeze"]["saved_bytes"].as_u64().unwrap() > 0);
    let kept = adapted["activations"].as_array().unwrap().iter();
    assert!(kept.clone().any(|one| one["label"] == "lora"));
    let printed = place
        .trainer("plan --config small.toml --device cpu --lora 4")
        .succeeds();
    assert!(
        printed
            .stdout
            .contains("freezing the others (--lora) saves"),
        "{printed:?}"
    );
}

#[test]
fn the_built_in_text_trains_adapters() {
    let place = Workplace::new();
    place.trainer("--lora 8 --steps 50 --out run").succeeds();
    let lines = place.text("run/metrics.jsonl");
    let steps = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    let steps: Vec<Value> = steps.filter(|line| line["kind"] == "step").collect();
    let loss = |step: usize| steps[step]["loss"].as_f64().unwrap();
    assert_eq!(steps.len(), 50);
    assert!(loss(49) < loss(0), "{} {}", loss(49), loss(0));
    assert_eq!(steps[0]["peak_bytes"], steps[0]["planned_peak_bytes"]);
}
