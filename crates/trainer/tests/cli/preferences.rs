//! `--objective dpo`: pairs of answers prepared, learnt by adapters and by a whole model, and what is refused.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::{Value, json};

/// A model, and prepared pairs whose texts differ in length.
fn with_pairs() -> Workplace {
    let place = Workplace::new();
    let init = "init --config small.toml --out model";
    place.trainer(init).succeeds();
    let pair = |number: usize| {
        let rejected = "no ".repeat(1 + number % 5);
        json!({"prompt": format!("{number} is "), "chosen": "a number", "rejected": rejected})
    };
    let lines: Vec<String> = (0..7).map(|number| pair(number).to_string()).collect();
    place.file("pairs.jsonl", lines.join("\n"));
    let prepare = "prepare pairs.jsonl --tokenizer bytes --out pairs --shard-tokens 50";
    let said = place.trainer(prepare).succeeds().stdout;
    assert!(said.starts_with("7 pairs, "), "{said}");
    let shards = place.names("pairs");
    let shards = shards.iter().filter(|name| name.ends_with(".bin"));
    assert!(shards.count() > 2, "pairs lie in several shards");
    place
}

/// The steps of a run, each with the peak that was planned.
fn steps(place: &Workplace, run: &str) -> Vec<Value> {
    let metrics = Metrics::read(place, run);
    let steps: Vec<Value> = metrics.steps().into_iter().cloned().collect();
    for step in &steps {
        assert_eq!(step["peak_bytes"], step["planned_peak_bytes"], "{step}");
    }
    steps
}

const TRAIN: &str = "train --init-from model --objective dpo --packing pad --micro-batch 2 --accum 2 --seq 32 --lr 0.01 \
                     --set data.any_tokenizer=true --data pairs --steps 8";

#[test]
fn adapters_come_to_prefer_what_was_chosen() {
    let place = with_pairs();
    let adapters = format!("{TRAIN} --lora 4");
    place
        .trainer(&format!("{adapters} --save-every 4 --out run"))
        .succeeds();
    let made = steps(&place, "run");
    assert_eq!(
        made[0]["loss"].as_f64().unwrap() as f32,
        std::f32::consts::LN_2
    );
    let last = &made[7];
    assert!(last["rewards_margin"].as_f64().unwrap() > 0.1, "{last}");
    assert_eq!(last["rewards_accuracy"], 1.0, "{last}");
    // Part of the way, and on from there.
    place
        .trainer(&format!(
            "{adapters} --recompute full --save-every 4 --out again"
        ))
        .succeeds();
    assert_eq!(steps(&place, "again")[7]["loss"], last["loss"]);
    place
        .trainer("train --resume run/checkpoints/step-4 --out on")
        .succeeds();
    assert_eq!(steps(&place, "on").last().unwrap()["loss"], last["loss"]);
}

/// A file of log-probabilities serves adapters as well, with the bits of the pass that it saves.
#[test]
fn a_whole_model_takes_its_reference_from_a_file() {
    let place = with_pairs();
    let flags = "--data pairs --seq 32 --set data.any_tokenizer=true --micro-batch 2";
    let said = place
        .trainer(&format!("eval model {flags} --reference reference.json"))
        .succeeds();
    assert_eq!(said.stdout, "14 texts; wrote reference.json\n");
    let known = "--set dpo.reference=reference.json";
    for (flags, out) in [("", "whole"), ("--lora 4", "known")] {
        place
            .trainer(&format!("{TRAIN} {known} {flags} --out {out}"))
            .succeeds();
        let made = steps(&place, out);
        let loss = made[0]["loss"].as_f64().unwrap();
        assert!((loss - std::f64::consts::LN_2).abs() < 1e-6, "{loss}");
        assert!(made[7]["rewards_margin"].as_f64().unwrap() > 0.1);
    }
    place
        .trainer(&format!("{TRAIN} --lora 4 --out computed"))
        .succeeds();
    let losses = |out| -> Vec<Value> {
        let made = steps(&place, out);
        made.iter().map(|step| step["loss"].clone()).collect()
    };
    assert_eq!(losses("known"), losses("computed"));
    place
        .trainer(&format!("{TRAIN} {known} --out short").replace("--seq 32", "--seq 24"))
        .fails(2, &["sequences of at most 32 tokens"]);
    let mut absurd: Value = serde_json::from_str(&place.text("reference.json")).unwrap();
    absurd["losses"][3] = json!(1e9);
    place.file("absurd.json", absurd.to_string());
    place
        .trainer(&format!(
            "{TRAIN} --set dpo.reference=absurd.json --out absurd"
        ))
        .fails(4, &["absurd.json", "a loss of 1000000000"]);
    place.file(
        "others.jsonl",
        place.text("pairs.jsonl").replace("number", "figure"),
    );
    let other = "prepare others.jsonl --tokenizer bytes --out other";
    place.trainer(other).succeeds();
    place
        .trainer(&format!("{TRAIN} {known} --out of-other").replace("--data pairs", "--data other"))
        .fails(2, &["other data"]);
}

/// Also where the first document for validation is long awaited, and documents are held until then.
#[test]
fn validation_takes_whole_pairs() {
    let place = with_pairs();
    let prepare = "prepare pairs.jsonl --tokenizer bytes --out apart --validation 0.3";
    place.trainer(prepare).succeeds();
    let summary: Value = serde_json::from_str(&place.text("apart/dataset.json")).unwrap();
    assert_eq!(
        (&summary["documents"], &summary["preferences"]),
        (&json!(7), &json!(true))
    );
    let texts = |split: &str| summary[split]["documents"].as_u64().unwrap();
    let (train, validation) = (texts("train"), texts("validation"));
    assert!(validation > 0 && validation % 2 == 0, "{validation}");
    assert_eq!(train + validation, 14);
}

#[test]
fn what_preferences_do_not_go_with_is_named() {
    let place = with_pairs();
    let dpo = "--objective dpo --packing pad --data pairs --seq 32";
    for (flags, words) in [
        (
            "--objective dpo --lora 4 --packing first-fit --data pairs",
            &["--packing pad"][..],
        ),
        (
            &format!("{dpo} --lora 4 --micro-batch 3"),
            &["batch.micro is 3", "even"],
        ),
        (dpo, &["--lora RANK", "--reference FILE"]),
        (
            &format!("{dpo} --lora 4 --eval-every 2"),
            &["not built", "rewards_accuracy"],
        ),
        ("--set dpo.beta=0.2", &["`dpo.beta`", "--objective dpo"]),
        (
            &format!("{dpo} --lora 4 --set dpo.loss=hinge"),
            &["sigmoid"],
        ),
        (
            &format!("{dpo} --lora 4 --config tiny-moe"),
            &["not built", "model.router_aux"],
        ),
    ] {
        let config = match flags.contains("--config") {
            true => "",
            false => "--config small.toml",
        };
        let command = format!("plan {config} {flags}");
        place.trainer(&command).fails(2, words);
    }
    // Experts do, where their routers have no losses.
    let experts = format!("plan --config tiny-moe --set model.router_aux=0 {dpo} --lora 4");
    place.trainer(&experts).succeeds();
    let train =
        "train --init-from model --seq 32 --set data.any_tokenizer=true --micro-batch 2 --steps 1";
    place
        .trainer(&format!("{train} --data pairs --out texts"))
        .fails(4, &["pairs", "--objective dpo"]);
    place
        .trainer("eval model --data pairs --seq 32 --set data.any_tokenizer=true")
        .fails(4, &["pairs", "--objective dpo"]);
    place.file("texts.jsonl", "{\"text\": \"abc\"}\n");
    let texts = "prepare texts.jsonl --tokenizer bytes --out texts";
    place.trainer(texts).succeeds();
    place
        .trainer(
            &format!("{TRAIN} --lora 4 --out no-pairs").replace("--data pairs", "--data texts"),
        )
        .fails(4, &["`chosen` and `rejected`"]);
    place
        .trainer("prepare pairs.jsonl texts.jsonl --tokenizer bytes --out mixed")
        .fails(4, &["a folder of its own"]);
}

/// Pairs that are longer than a row count in the means all the same.
#[test]
fn pairs_that_are_cut_are_counted_at_the_start() {
    let place = with_pairs();
    let run = TRAIN.replace("--packing pad", "--lora 4");
    let said = |seq: &str, out: &str| {
        let run = run.replace("--seq 32", seq);
        place.trainer(&format!("{run} --out {out}"))
    };
    let outcome = said("--seq 8", "cut").succeeds();
    let line = "7 of 7 pairs have a text longer than --seq 8, which loses its end; all of them count in the means";
    assert_eq!(outcome.stderr.matches(line).count(), 1, "{outcome:?}");
    let reason = "data.packing is pad: each text of a pair is a row of its own";
    assert!(outcome.stderr.contains(reason), "{outcome:?}");
    let whole = said("--seq 32", "whole").succeeds();
    assert!(!whole.stderr.contains("longer than"), "{whole:?}");
    // No answer is left of any.
    let outcome = said("--seq 4", "none").fails(4, &["7 of 7 documents or pairs", "raise --seq"]);
    assert!(!outcome.stderr.contains("batch.micro"), "{outcome:?}");
}

/// The smallest is a pair, and so is what comes next.
#[test]
fn the_largest_micro_batch_has_whole_pairs() {
    let place = with_pairs();
    let run = "--config tiny --lora 4 --objective dpo --packing pad --data pairs --seq 64 --micro-batch 2 --device cpu";
    let plan = |more: &str| -> Value {
        let outcome = place.trainer(&format!("plan {run} --json --largest micro-batch {more}"));
        // Nothing fits 2 MiB: the plan is printed all the same.
        assert!(matches!(outcome.code, Some(0 | 3)), "{outcome:?}");
        serde_json::from_str(&outcome.stdout).unwrap()
    };
    let least = &plan("--device-memory 2MiB")["largest"];
    assert_eq!((&least["value"], &least["next"]), (&Value::Null, &json!(2)));
    let most = &plan("--device-memory 20MiB")["largest"];
    let value = most["value"].as_u64().unwrap();
    assert!(value > 2 && value.is_multiple_of(2), "{most}");
    assert_eq!(most["next"], value + 2);
}
