//! No key does nothing in silence: set to a legal value that is not its default, it changes what is planned, computed, written or
//! said, or it is refused, or a warning says that it has no effect.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use settings::keys::KEYS;
use settings::kind::{Kind, Range};
use settings::{Key, KeyDefault};
use std::path::Path;

/// Keys that change speed, or the hardware that estimates go by, alone, besides `hardware.*`.
const SPEED: [&str; 3] = ["data.prefetch", "train.graphs", "train.threads"];

/// Keys that speak where something fails or is missing, between processes or on GPUs alone, as in none of these runs.
const ELSEWHERE: [&str; 7] = [
    "collectives.engine",
    "collectives.timeout_s",
    "data.any_tokenizer",
    "fp8.fast_accumulation",
    "log.every",
    "memory.force",
    "train.max_skipped",
];

/// Settings that stand for what these runs do anyway: prepared data is in this format, two steps are too few for a decay, and experts
/// have these scores.
const ANYWAY: [&str; 3] = [
    "data.format=llmc",
    "lr.schedule=wsd",
    "model.experts.score=\"softmax\"",
];

/// The settings of a kind of run, and beginnings of the keys that are set in it. With `ranks`, it is only planned.
type Base = (&'static str, &'static [&'static str]);

#[rustfmt::skip]
const BASES: [Base; 19] = [
    ("", &[""]),
    ("optim.kind=adafactor", &["optim.", "lr."]),
    ("optim.kind=muon", &["optim.", "lr."]),
    ("optim.state_dtype=8bit train.dtype=bf16", &["optim."]),
    ("lr.schedule=wsd lr.warmup_steps=1", &["lr.decay", "lr.warmup"]),
    ("lora.rank=2", &["lora.", "optim.", "model.dropout"]),
    ("lora.rank=2 lora.base_dtype=nf4 train.dtype=bf16", &["lora."]),
    ("train.objective=dpo lora.rank=2 data.packing=pad data.path=pairs", &["dpo.", "lora.", "model.dropout", "data."]),
    ("model.experts={count=4,chosen=2,ffn=16,normed=true} model.router_aux=0.1", &["model.experts.", "model.router", "optim.router"]),
    ("model.norm=layer model.activation=gelu_tanh model.positions=learned model.max_positions=64 model.biases=true model.tie_embeddings=true", &["model."]),
    ("ranks collectives.zero=1", &["collectives.", "parallel."]),
    ("ranks collectives.zero=3", &["collectives.", "parallel."]),
    ("log.sample_every=1", &["log."]),
    ("eval.every=1 eval.path=other.txt", &["eval.", "checkpoint."]),
    ("checkpoint.every=1", &["checkpoint."]),
    ("offload.optimizer=pinned offload.parameters=pinned model.ffn=8192", &["offload."]),
    ("fp8.recipe=tensor train.dtype=bf16", &["fp8."]),
    ("recompute.spec=auto memory.budget=1GiB", &["recompute.", "memory."]),
    ("model.rope_scaling={kind=\"llama3\",factor=8.0,low_freq_factor=1.0,high_freq_factor=4.0,original_max_position=16}",
        &["model.rope_scaling."]),
];

/// Values of keys whose kind and default do not say what makes sense in a small run.
const VALUES: [(&str, &str); 34] = [
    ("checkpoint.keep_last", "1"),
    ("collectives.bucket_size", "8KiB"),
    ("data.path", "small.txt:2"),
    ("eval.path", "small.txt"),
    ("eval.samples", "1"),
    ("fp8.except", "[\"*down_proj*\"]"),
    ("log.every", "1"),
    ("log.sample_prompt", "Once"),
    ("log.sample_tokens", "3"),
    ("lora.alpha_pattern", "{no_such=2.0}"),
    ("lora.base_skip", "[\"q_proj\"]"),
    ("lora.layers", "[0]"),
    ("lora.rank_pattern", "{no_such=1}"),
    ("lora.targets", "[\"q_proj\"]"),
    ("lr.decay_steps", "2"),
    ("memory.budget", "100KiB"),
    ("memory.limit", "1KiB"),
    ("memory.expert_unit", "4"),
    ("memory.tile_tokens", "8"),
    ("model.family", "qwen3"),
    ("model.full_attention_layers", "[0]"),
    ("model.no_rope_layers", "[0]"),
    ("model.sliding_window", "8"),
    ("offload.activations", "block_input"),
    ("offload.path", "scratch"),
    ("offload.slab_mib", "1"),
    ("optim.clip_norm", "0.001"),
    ("optim.matrices", "[\"*q_proj*\"]"),
    ("optim.f32_states", "[\"*q_proj*\"]"),
    ("recompute.layers", "{\"0\"=\"full\"}"),
    ("recompute.spec", "full"),
    ("train.device", "cuda"),
    ("train.freeze", "[\"*norm*\"]"),
    ("train.steps", "3"),
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
    let table: toml::Table = format!("value = {default}").parse().unwrap();
    let default = &table["value"];
    let whole = default.as_integer();
    let number = whole.map(|number| number as f64).or(default.as_float());
    match key.kind {
        Kind::Bool => vec![(default.as_bool() != Some(true)).to_string()],
        Kind::Choice(names) | Kind::NameOrFolder(names) => {
            let others = names.iter().filter(|name| Some(**name) != default.as_str());
            others.map(ToString::to_string).collect()
        }
        Kind::Whole(_) | Kind::WholeUpTo(..) => vec![(whole.unwrap() + 2).to_string()],
        Kind::WholeOrAuto(_) => vec!["7".into()],
        Kind::Real(Range::NotPositive) => vec!["-0.5".into()],
        Kind::Real(_) => vec![(number.unwrap() * 0.5 + 0.07).to_string()],
        Kind::Reals(count) => vec![format!("{:?}", vec![1.5; count])],
        Kind::AutoAndReal => vec!["[0.01,0.02]".into()],
        Kind::Size => vec!["1MiB".into()],
        Kind::Texts => vec!["[\"*proj*\"]".into()],
        _ => panic!("{} needs a value in VALUES", key.name),
    }
}

/// A command with one more setting, as its words.
fn words(command: &str, set: Option<&str>) -> Vec<String> {
    let words = command.split_whitespace().map(str::to_owned);
    let set = set.map(|set| ["--set".to_owned(), set.to_owned()]);
    words.chain(set.into_iter().flatten()).collect()
}

/// How a command ended, and what it said.
fn said(place: &Workplace, command: &str, set: Option<&str>) -> (Option<i32>, String, String) {
    let outcome = place.trainer_words(&words(command, set));
    (outcome.code, outcome.stdout, outcome.stderr)
}

/// All that a run leaves and says, but for its configuration and what the clock says: its records, its files by name, the values of
/// its tensors, and its lines without figures. An error, if it is refused.
fn left(place: &Workplace, command: &str, set: Option<&str>) -> Result<Vec<String>, String> {
    let command = format!("{command} --out run --save-final run/final");
    let outcome = place.trainer_words(&words(&command, set));
    if outcome.code != Some(0) {
        let _ = std::fs::remove_dir_all(place.path("run"));
        return Err(outcome.stderr);
    }
    let records = Metrics::read(place, "run");
    let mut left = records.untimed_steps();
    for record in records.of_kind("eval").chain(records.of_kind("sample")) {
        let mut record = record.clone();
        let fields = record.as_object_mut().unwrap();
        fields.retain(|name, _| !name.ends_with("_ms") && !name.ends_with("_s"));
        left.push(record.to_string());
    }
    // The units of durations and rates depend on how fast the machine is.
    let is_unit = |word: &str| word.ends_with("/s") || ["us", "ms", "s", "min"].contains(&word);
    let is_timed = |line: &str| line.split([' ', ',', ')']).any(is_unit);
    let without_figures = |line: &str| line.replace(|letter: char| !letter.is_alphabetic(), "");
    let lines = outcome.stderr.lines();
    left.extend(lines.filter(|line| !is_timed(line)).map(without_figures));
    left.push(format!("{} lines", outcome.stdout.lines().count()));
    files(&place.path("run"), &mut left);
    std::fs::remove_dir_all(place.path("run")).unwrap();
    Ok(left)
}

/// Names below a folder, with the contents of tensors.
fn files(folder: &Path, into: &mut Vec<String>) {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    for path in paths {
        let name = path.file_name().unwrap().to_string_lossy();
        // An event file is named by the second and the process.
        into.push(name.split(".tfevents").next().unwrap().to_owned());
        if path.is_dir() {
            files(&path, into);
        } else if name.ends_with(".safetensors") {
            into.push(format!("{:x?}", std::fs::read(&path).unwrap()));
        }
    }
}

#[test]
fn no_key_does_nothing_in_silence() {
    let place = Workplace::new();
    let text = "Once upon a time there was a small text. ";
    place.file("small.txt", text.repeat(40));
    place.file("other.txt", "Another text, of other words. ".repeat(40));
    let pairs = (0..8).map(|number| {
        format!(r#"{{"prompt": "{number} is ", "chosen": "a number", "rejected": "no"}}"#)
    });
    place.file("pairs.jsonl", pairs.collect::<Vec<_>>().join("\n"));
    let prepare = "prepare pairs.jsonl --tokenizer bytes --out pairs";
    place.trainer(prepare).succeeds();
    let mut silent = Vec::new();
    for (base, beginnings) in BASES {
        let ranks = base.strip_prefix("ranks ");
        let common = "train.device=cpu train.steps=2 data.seq=32";
        let all = format!("{common} {}", ranks.unwrap_or(base));
        let sets = all.split_whitespace().map(|set| format!(" --set {set}"));
        let flags = format!("--config small.toml{}", sets.collect::<String>());
        let plan = match ranks {
            Some(_) => format!("plan --json --ranks 2 {flags}"),
            None => format!("plan --json {flags}"),
        };
        let planned = said(&place, &plan, None);
        assert_eq!(planned.0, Some(0), "{base}: {}", planned.2);
        assert!(!planned.2.contains(" WARN "), "{base}: {}", planned.2);
        let train = format!("train {flags}");
        let mut plain = None;
        let keys = KEYS.iter().filter(|key| {
            let name = key.name;
            let is_here = beginnings.iter().any(|one| name.starts_with(one));
            is_here
                && !name.starts_with("hardware.")
                && ![&SPEED[..], &ELSEWHERE].concat().contains(&name)
        });
        for key in keys {
            for value in values(key) {
                let set = format!("{}={value}", key.name);
                // In a table of the base, a key stands without its section.
                let name = key.name.rsplit('.').next().unwrap_or(key.name);
                let within = format!("{name}={value}");
                let mut words = base.split([' ', '{', '}', ',']);
                let is_there = words.any(|word| word == set || word == within);
                if ANYWAY.contains(&&set[..]) || is_there {
                    continue;
                }
                if said(&place, &plan, Some(&set)) != planned {
                    continue;
                }
                let is_silent = ranks.is_some() || {
                    let plain = plain.get_or_insert_with(|| left(&place, &train, None).unwrap());
                    left(&place, &train, Some(&set)).as_ref() == Ok(plain)
                };
                if is_silent {
                    silent.push(format!("{base} {set}"));
                }
            }
        }
    }
    assert!(silent.is_empty(), "{}", silent.join("\n"));
}
