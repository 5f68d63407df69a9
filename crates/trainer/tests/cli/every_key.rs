//! No key does nothing in silence: set to a legal value that is not its default, it changes what is planned, computed, written or
//! said, or it is refused, or a warning says that it has no effect.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use settings::keys::KEYS;
use settings::kind::{Kind, Range};
use settings::{Key, KeyDefault};
use std::path::Path;
use toml::Value;

/// Keys that change speed, or the hardware that estimates go by, alone.
const SPEED: [&str; 2] = ["train.threads", "train.graphs"];

/// Keys that speak where something fails or is missing, which it does in none of these runs.
const FAILURES: [&str; 4] = [
    "collectives.timeout_s",
    "data.any_tokenizer",
    "memory.force",
    "train.max_skipped",
];

/// A kind of run, and beginnings of the keys that are set in it.
type Base = (&'static str, &'static [&'static str]);

const BASES: [Base; 18] = [
    ("", &[""]),
    ("--optimizer adafactor", &["optim.", "lr."]),
    ("--optimizer muon", &["optim.", "lr."]),
    ("--state-dtype 8bit --dtype bf16", &["optim."]),
    ("--schedule wsd --warmup 1", &["lr."]),
    ("--lora 2", &["lora.", "optim.", "model.dropout"]),
    ("--lora 2 --base-dtype nf4 --dtype bf16", &["lora."]),
    (
        "--objective dpo --lora 2 --packing pad --data pairs --seq 32",
        &["dpo.", "lora.", "model.dropout", "data."],
    ),
    (
        "--set model.experts={count=4,chosen=2,ffn=16} --set model.router_aux=0.1",
        &["model.experts.", "model.router", "optim.router"],
    ),
    ("--config learned.toml", &["model."]),
    ("--zero 3", &["collectives.", "parallel."]),
    ("--sample-every 1", &["log."]),
    ("--eval-every 1", &["eval.", "checkpoint."]),
    ("--save-every 1", &["checkpoint."]),
    (
        "--offload-optimizer pinned --offload-parameters pinned",
        &["offload."],
    ),
    ("--fp8 tensor --dtype bf16", &["fp8."]),
    (
        "--recompute auto --memory-budget 1GiB",
        &["recompute.", "memory."],
    ),
    (
        "--set model.rope_scaling={kind=\"llama3\",factor=8.0,low_freq_factor=1.0,high_freq_factor=4.0,original_max_position=16}",
        &["model.rope_scaling."],
    ),
];

/// Values of keys whose kind does not say what makes sense.
const VALUES: [(&str, &str); 17] = [
    ("data.path", "small.txt:2"),
    ("eval.path", "small.txt"),
    ("lora.alpha_pattern", "{q_proj=3.0,no_such=2.0}"),
    ("lora.base_skip", "[\"q_proj\"]"),
    ("lora.rank_pattern", "{no_such=1}"),
    ("lora.targets", "[\"q_proj\"]"),
    ("model.full_attention_layers", "[0]"),
    ("offload.activations", "block_input"),
    ("offload.optimizer", "pinned"),
    ("offload.path", "scratch"),
    ("optim.f32_states", "[\"*q_proj*\"]"),
    ("recompute.layers", "{\"0\"=\"full\"}"),
    ("recompute.spec", "full"),
    ("train.device", "cuda"),
    ("train.freeze", "[\"*norm*\"]"),
    ("fp8.except", "[\"*down_proj*\"]"),
    ("log.sample_prompt", "Once"),
];

/// Legal values of a key that are not its default.
fn values(key: &Key) -> Vec<String> {
    if let Some((_, value)) = VALUES.iter().find(|(name, _)| *name == key.name) {
        return vec![(*value).into()];
    }
    let default = match key.default {
        KeyDefault::Absent { example, .. } => return vec![example.into()],
        KeyDefault::Value(default) => default,
    };
    let default = format!("value = {default}").parse::<toml::Table>().unwrap()["value"].clone();
    let number = default
        .as_integer()
        .map(|number| number as f64)
        .or(default.as_float());
    match key.kind {
        Kind::Bool => vec![(default != Value::Boolean(true)).to_string()],
        Kind::Choice(names) | Kind::NameOrFolder(names) => {
            let others = names.iter().filter(|name| Some(**name) != default.as_str());
            others.map(ToString::to_string).collect()
        }
        Kind::Whole(_) | Kind::WholeUpTo(..) => {
            vec![(default.as_integer().unwrap() + 1).to_string()]
        }
        Kind::WholeOrAuto(_) => vec!["7".into()],
        Kind::Real(Range::NotPositive) => vec!["-0.5".into()],
        Kind::Real(_) => vec![(number.unwrap() * 0.5 + 0.05).to_string()],
        Kind::Reals(count) => vec![format!("{:?}", vec![1.5; count])],
        Kind::AutoAndReal => vec!["[0.01, 0.02]".into()],
        Kind::Size => vec!["1MiB".into()],
        Kind::Texts => vec!["[\"*proj*\"]".into()],
        _ => panic!("{} needs a value in VALUES", key.name),
    }
}

/// What a command says without figures of the clock, and how it ended.
fn said(place: &Workplace, words: &[String]) -> (Option<i32>, String, String) {
    let outcome = place.trainer_words(words);
    (outcome.code, outcome.stdout, outcome.stderr)
}

/// All that a run leaves, but for its configuration and what the clock says: records, names of files and the trained model.
fn left(place: &Workplace, words: &[String], out: &str) -> Result<Vec<String>, String> {
    let flags = ["--out", out, "--save-final", &format!("{out}/final")].map(str::to_owned);
    let outcome = place.trainer_words(&[words, &flags].concat());
    if outcome.code != Some(0) {
        return Err(outcome.stderr);
    }
    let mut left = Metrics::read(place, out).untimed_steps();
    let records = Metrics::read(place, out);
    left.extend(["eval", "sample", "checkpoint"].map(|kind| {
        let texts = records.of_kind(kind).map(|record| {
            let mut record = record.clone();
            record
                .as_object_mut()
                .unwrap()
                .retain(|name, _| !name.ends_with("_ms") && !name.ends_with("_s"));
            record.to_string()
        });
        texts.collect::<Vec<_>>().join(" ")
    }));
    let letters = outcome
        .stderr
        .chars()
        .filter(|letter| !letter.is_ascii_digit());
    left.push(letters.collect::<String>().replace(out, "OUT"));
    files(&place.path(out), &mut left);
    Ok(left)
}

/// Names below a folder, with the contents of tensors.
fn files(folder: &Path, into: &mut Vec<String>) {
    let mut paths: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    for path in paths {
        into.push(path.file_name().unwrap().to_str().unwrap().to_owned());
        match path.extension() {
            _ if path.is_dir() => files(&path, into),
            Some(ending) if ending == "safetensors" => {
                into.push(format!("{:x?}", std::fs::read(&path).unwrap()));
            }
            _ => {}
        }
    }
}

#[test]
fn no_key_does_nothing_in_silence() {
    let place = Workplace::new();
    let small = place.text("small.toml");
    let learned = "norm = \"layer\"\nactivation = \"gelu_tanh\"\npositions = \"learned\"\nmax_positions = 64\nbiases = true\n[data]";
    place.file("learned.toml", small.replace("[data]", learned));
    place.file(
        "small.txt",
        "Once upon a time there was a small text. ".repeat(40),
    );
    let pair = r#"{"prompt": "1 is ", "chosen": "a number", "rejected": "no"}"#;
    place.file("pairs.jsonl", [pair; 8].join("\n"));
    place
        .trainer("prepare pairs.jsonl --tokenizer bytes --out pairs")
        .succeeds();
    let mut silent = Vec::new();
    for (number, (base, beginnings)) in BASES.iter().enumerate() {
        let file = if base.contains("--config") {
            ""
        } else {
            "--config small.toml"
        };
        let base = format!("{file} --device cpu --steps 2 {base}");
        let words: Vec<String> = base.split_whitespace().map(str::to_owned).collect();
        let with = |task: &[&str], more: &[String]| {
            let task: Vec<String> = task.iter().map(ToString::to_string).collect();
            [&task, &words, more].concat()
        };
        let planned = said(&place, &with(&["plan", "--json"], &[]));
        assert_eq!((planned.0, &planned.2[..]), (Some(0), ""), "{base}");
        let mut trained = None;
        let keys = KEYS
            .iter()
            .filter(|key| beginnings.iter().any(|one| key.name.starts_with(one)));
        for key in
            keys.filter(|key| !key.name.starts_with("hardware.") && !SPEED.contains(&key.name))
        {
            for value in values(key) {
                let set = ["--set".to_owned(), format!("{}={value}", key.name)];
                if base.contains(&format!("--set {}=", key.name))
                    || said(&place, &with(&["plan", "--json"], &set)) != planned
                {
                    continue;
                }
                let plain = trained.get_or_insert_with(|| {
                    left(&place, &with(&["train"], &[]), &format!("run-{number}")).unwrap()
                });
                let out = format!("run-{number}-set");
                if left(&place, &with(&["train"], &set), &out).as_ref() != Ok(plain)
                    || FAILURES.contains(&key.name)
                {
                    let _ = std::fs::remove_dir_all(place.path(&out));
                    continue;
                }
                std::fs::remove_dir_all(place.path(&out)).unwrap();
                silent.push(format!("{base} {}", set[1]));
            }
        }
    }
    assert!(silent.is_empty(), "{}", silent.join("\n"));
}
