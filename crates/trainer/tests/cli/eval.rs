//! `eval`: what it measures, and of which folders.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::Value;

/// Two samples of 32 bytes, and the byte after them.
const TEXT: &str = "The model is asked about the text, and the text says nothing new.";

fn place() -> Workplace {
    let place = Workplace::new();
    place.file("text.txt", TEXT);
    place
        .trainer("init --config small.toml --seed 5 --out model")
        .succeeds();
    place
}

#[track_caller]
fn eval(place: &Workplace, arguments: &str) -> Value {
    let outcome = place
        .trainer(&format!("eval {arguments} --json"))
        .succeeds();
    serde_json::from_str(&outcome.stdout).unwrap()
}

/// The first step's loss is that of the weights before it.
#[test]
fn the_loss_is_that_of_training() {
    let place = place();
    let train = "--init-from model --data text.txt --seq 32 --micro-batch 2 --steps 1 --out run";
    place.trainer(train).succeeds();
    let trained = Metrics::read(&place, "run").losses()[0];
    let record = eval(&place, "model --data text.txt --micro-batch 2 --seq 32");
    let number = |name: &str| record[name].as_f64().unwrap();
    assert!(
        (number("loss") - trained).abs() < 1e-6,
        "{record} {trained}"
    );
    assert!((number("perplexity").ln() - number("loss")).abs() < 1e-9);
    let bits = number("loss") / std::f64::consts::LN_2;
    assert!(
        (number("bits_per_byte") - bits).abs() < 1e-9,
        "a token is a byte"
    );
    assert_eq!(
        (record["targets"].as_u64(), record["samples"].as_u64()),
        (Some(64), Some(2))
    );
    assert_eq!(record["peak_bytes"], record["planned_peak_bytes"]);
    let in_parts = "model --data text.txt --micro-batch 2 --seq 32 --set parallel.context_parts=2";
    assert_eq!(
        eval(&place, in_parts)["loss"],
        record["loss"],
        "parts are training's alone"
    );
    let one = eval(&place, "model --data text.txt --seq 32");
    assert!((one["loss"].as_f64().unwrap() - number("loss")).abs() < 1e-6);
    assert!(one["peak_bytes"].as_u64() < record["peak_bytes"].as_u64());
    let words = place
        .trainer("eval model --data text.txt --threads 1")
        .succeeds()
        .stdout;
    assert_eq!(
        words,
        place
            .trainer("eval model --data text.txt --threads 3")
            .succeeds()
            .stdout
    );
    assert!(
        words.starts_with(&format!("loss {:.4}", number("loss"))),
        "{words}"
    );
    assert!(words.contains("bits per byte"), "{words}");
}

/// A sample that fills no micro-batch counts as well, and so does the shorter one at the end of the text.
#[test]
fn every_sample_counts_once() {
    let place = place();
    let seq = "--data text.txt --seq 12";
    let all = eval(&place, &format!("model {seq} --micro-batch 4"));
    assert_eq!(
        (all["samples"].as_u64(), all["targets"].as_u64()),
        (Some(6), Some(64))
    );
    assert_eq!(all["peak_bytes"], all["planned_peak_bytes"]);
    place.file("begin.txt", &TEXT[..41]);
    place.file("end.txt", &TEXT[40..]);
    let loss = |arguments: &str| {
        eval(&place, &format!("model {arguments}"))["loss"]
            .as_f64()
            .unwrap()
    };
    let parts = 40.0 * loss("--data begin.txt --seq 40") + 24.0 * loss("--data end.txt --seq 24");
    for seq in [40, 24] {
        assert!(
            (loss(&format!("--data end.txt --seq {seq}")) - loss("--data end.txt --seq 24")).abs()
                < 1e-6
        );
    }
    assert!((loss("--data text.txt --seq 40") - parts / 64.0).abs() < 1e-6);
    let first = eval(&place, &format!("model {seq} --set eval.samples=2"));
    assert_eq!(
        (&first["samples"], &first["targets"]),
        (&2.into(), &24.into())
    );
    let few = eval(&place, &format!("model {seq} --micro-batch 100"));
    assert!((all["loss"].as_f64().unwrap() - few["loss"].as_f64().unwrap()).abs() < 1e-6);
}

/// Of a run its newest checkpoint, whose sequences are those of its training.
#[test]
fn a_run_is_its_newest_checkpoint() {
    let place = place();
    place
        .trainer("--config small.toml --seed 5 --save-every 2 --out run")
        .succeeds();
    let of_run = eval(&place, "run --data text.txt");
    assert_eq!(of_run["seq"], 32);
    let newest = eval(&place, "run/checkpoints/step-4 --data text.txt");
    assert_eq!(of_run, newest, "both name the same folder");
    let before = eval(&place, "run/checkpoints/step-2 --data text.txt");
    let fresh = eval(&place, "model --data text.txt");
    let loss = |record: &Value| record["loss"].as_f64().unwrap();
    assert!(loss(&of_run) < loss(&before) && loss(&before) < loss(&fresh));
}

#[test]
fn what_is_no_model_is_refused() {
    let place = place();
    place.folder("empty");
    place
        .trainer("eval empty --data text.txt")
        .fails(4, &["empty"]);
    place
        .trainer("eval model --data none.txt")
        .fails(4, &["none.txt"]);
    place
        .trainer("eval model --data text.txt --micro-batch 0")
        .fails(2, &["--micro-batch"]);
    place.file("byte.txt", "a");
    place
        .trainer("eval model --data byte.txt")
        .fails(4, &["byte.txt", "needs 2"]);
}

/// Other commands that take such folders say the same.
#[test]
fn a_folder_that_is_none_of_these() {
    let place = place();
    place.folder("nothing");
    for command in [
        "eval nothing --data text.txt",
        "export nothing --out exported",
        "--config small.toml --resume nothing --out run",
    ] {
        let words = ["`nothing` ", "hint: ", "folder of a run", "config.json"];
        place.trainer(command).fails(4, &words);
    }
}
