//! `--epochs`: how many steps it is, and where a run is in its data.

use crate::metrics::Metrics;
use crate::workplace::Workplace;

/// With 20 samples of 32 bytes, of which a step takes 4.
fn place() -> Workplace {
    let place = Workplace::new();
    let text: Vec<u8> = (0..20 * 32 + 1u32)
        .map(|at| (at * at % 97) as u8 + 20)
        .collect();
    place.file("text.txt", text);
    place
}

fn epochs(place: &Workplace, run: &str) -> Vec<f64> {
    let steps = Metrics::read(place, run);
    let epochs = steps.steps().into_iter().map(|step| step["epoch"].as_f64());
    epochs.collect::<Option<_>>().unwrap()
}

const RUN: &str = "--config small.toml --data text.txt";

#[test]
fn epochs_are_the_steps_that_have_every_sample_so_often() {
    let place = place();
    let run = |settings: &str, out: &str| {
        place
            .trainer(&format!("{RUN} {settings} --out {out}"))
            .succeeds()
    };
    let said = run("--epochs 2", "two");
    let words = "--epochs 2: 20 samples in each, 10 steps of 4";
    assert!(said.stderr.contains(words), "{}", said.stderr);
    let expected: Vec<f64> = (1..=10).map(|step| f64::from(step) / 5.0).collect();
    assert_eq!(epochs(&place, "two"), expected);
    assert!(said.stderr.contains("epoch 2.00"), "{}", said.stderr);
    let again = said.stderr.matches("a second pass begins").count();
    assert_eq!(again, 1, "{}", said.stderr);
    assert!(
        said.stderr.contains("step 6: all 20 samples"),
        "{}",
        said.stderr
    );
    // A step that one and a half passes end within is filled up.
    let said = run("--epochs 1.5", "more");
    assert_eq!(epochs(&place, "more").len(), 8);
    assert_eq!(epochs(&place, "more")[7], 1.6);
    assert!(said.stderr.contains("8 steps of 4"), "{}", said.stderr);
    let said = run("--epochs 1", "one");
    assert!(!said.stderr.contains("second pass"), "{}", said.stderr);
    let page = place.text("two/report.html");
    assert!(
        page.contains("<dt>epochs</dt><dd>2</dd>"),
        "the page says how many"
    );
}

/// The schedule ends with the last step that follows, and a plan takes the same settings.
#[test]
fn they_are_as_if_the_steps_were_written() {
    let place = place();
    let cosine = "--set lr.schedule=cosine --set lr.warmup_steps=1";
    for (length, out) in [
        ("--epochs 1", "epochs"),
        ("--steps 5", "steps"),
        ("--steps 10", "longer"),
    ] {
        place
            .trainer(&format!("{RUN} {cosine} {length} --out {out}"))
            .succeeds();
    }
    let [epochs, steps, longer] =
        ["epochs", "steps", "longer"].map(|run| Metrics::read(&place, run).untimed_steps());
    assert_eq!(epochs, steps);
    assert_ne!(
        epochs[..],
        longer[..5],
        "the schedule depends on the number of steps"
    );
    let plan = |length: &str| {
        let plan = format!("plan {RUN} {length} --device cpu --json");
        place.trainer(&plan).succeeds().stdout
    };
    assert_eq!(plan("--epochs 3"), plan("--steps 15"));
    place
        .trainer(&format!(
            "{RUN} --epochs 1 --set lr.schedule=wsd --set lr.decay_steps=6 --out run"
        ))
        .fails(2, &["`lr.decay_steps` is 6", "only 5 steps"]);
}

#[test]
fn a_run_that_goes_on_counts_from_its_beginning() {
    let place = place();
    place
        .trainer(&format!("{RUN} --epochs 1 --save-every 2 --out whole"))
        .succeeds();
    let rest = place
        .trainer("--resume whole/checkpoints/step-2 --out rest")
        .succeeds();
    assert!(rest.stderr.contains("5 steps of 4"), "{}", rest.stderr);
    let whole = Metrics::read(&place, "whole").untimed_steps();
    assert_eq!(Metrics::read(&place, "rest").untimed_steps(), whole[2..]);
    place.trainer("--resume whole --epochs 2").succeeds();
    assert_eq!(*epochs(&place, "whole").last().unwrap(), 2.0);
    // Steps that are asked for take the place of the run's epochs.
    place.trainer("--resume whole --steps 11").succeeds();
    assert_eq!(epochs(&place, "whole").len(), 11);
    assert!(!place.text("whole/config.toml").contains("epochs"));
}

#[test]
fn two_lengths_are_refused() {
    let place = place();
    for both in ["--epochs 2 --steps 3", "--epochs 2 --set train.steps=3"] {
        place
            .trainer(&format!("{RUN} {both} --out run"))
            .fails(2, &["`--epochs 2`", "how long the run is", "leave one"]);
    }
    place
        .trainer(&format!("{RUN} --epochs 0 --out run"))
        .fails(2, &["--epochs 0", "above 0"]);
    place
        .trainer(&format!("{RUN} --epochs 1 --dump-gradients 6 --out run"))
        .fails(2, &["--dump-gradients 6", "5 steps"]);
    assert!(!place.path("run").exists(), "nothing is left behind");
}
