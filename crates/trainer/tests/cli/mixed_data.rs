//! Several inputs: `--data DIR:WEIGHT`, repeated.

use crate::metrics::Metrics;
use crate::workplace::Workplace;

const RUN: &str = "--config small.toml --steps 8 --save-every 3";

/// Two prepared folders of bytes: 30 samples of 32, and 10.
fn place() -> Workplace {
    let place = Workplace::new();
    for (name, letters, samples) in [("a", "some words ", 30), ("b", "0123456789\n", 10)] {
        let text: String = letters.chars().cycle().take(32 * samples).collect();
        place.file(&format!("{name}.txt"), text);
        let rest = "--tokenizer bytes --validation 0.15";
        place
            .trainer(&format!("prepare {name}.txt --out {name} {rest}"))
            .succeeds();
    }
    place
}

fn run(place: &Workplace, settings: &str, out: &str) -> Vec<String> {
    place
        .trainer(&format!("{RUN} {settings} --out {out}"))
        .succeeds();
    Metrics::read(place, out).untimed_steps()
}

#[test]
fn weights_say_which_samples_come_and_a_run_goes_on_with_the_same() {
    let place = place();
    let mixed = run(&place, "--data a:0.75 --data b:0.25", "mixed");
    assert_eq!(run(&place, "--data a:3 --data b:1", "same"), mixed);
    assert_ne!(run(&place, "--data a:0.25 --data b:0.75", "other"), mixed);
    assert_ne!(run(&place, "--data a", "alone"), mixed);
    let set = "--set data.path=[\"a:0.75\",\"b:0.25\"]";
    assert_eq!(run(&place, set, "set"), mixed);
    place
        .trainer("--resume mixed/checkpoints/step-3 --out rest")
        .succeeds();
    assert_eq!(Metrics::read(&place, "rest").untimed_steps(), mixed[3..]);
    // Other weights are other data.
    place
        .trainer("--resume mixed/checkpoints/step-3 --data a:1 --data b:1 --out changed")
        .fails(2, &["the data is other than before"]);
    let said = place
        .trainer(&format!("{RUN} --data a:0.75 --data b:0.25 --out said"))
        .succeeds();
    // 25 of an epoch's 33 samples.
    assert!(said.stderr.contains("75.8 % a: "), "{}", said.stderr);
}

/// An epoch of inputs without weights has every sample of each once.
#[test]
fn inputs_without_weights_give_all_that_they_have() {
    let place = place();
    let said = place
        .trainer("--config small.toml --data a --data b --epochs 1 --eval-every 5 --out run")
        .succeeds();
    // Of 961 and 321 tokens 144 and 48 are for validation.
    assert!(
        said.stderr.contains("33 samples in each, 9 steps of 4"),
        "{}",
        said.stderr
    );
    // What is evaluated is the validation part of both, to its last token.
    let metrics = Metrics::read(&place, "run");
    let evaluation = metrics.of_kind("eval").next().unwrap();
    assert_eq!(evaluation["targets"], 143 + 47);
}

#[test]
fn what_makes_no_mixture_is_refused() {
    let place = place();
    let refused = |settings: &str, code: i32, words: &[&str]| {
        place
            .trainer(&format!("{RUN} {settings} --out run"))
            .fails(code, words)
    };
    refused(
        "--data a:0.5 --data b",
        2,
        &["--data a:0.5 --data b", "all with a weight"],
    );
    refused("--data a:0 --data b:1", 2, &["--data a:0", "above 0"]);
    refused("--set data.path=[]", 2, &["data.path"]);
    refused(
        "--data a:1 --data nowhere:1",
        4,
        &["nowhere does not exist"],
    );
    refused(
        "--data a --data b.txt --set model.vocab=300 --data nothing.bin",
        4,
        &["nothing.bin"],
    );
    place
        .trainer("prepare a.txt:0.3 b.txt:0.7 --out both --tokenizer bytes")
        .fails(2, &["a.txt:0.3", "takes no weights", "--data DIR:WEIGHT"]);
    assert!(!place.path("run").exists(), "nothing is left behind");
}
