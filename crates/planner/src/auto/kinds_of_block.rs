//! Tests of the choice for a model with four kinds of block and 14 labels.

use super::tests::config;
use super::*;
use crate::Plan;
use synthetic::{LABELS, architecture};

#[path = "../../../model/tests/it/common/synthetic.rs"]
mod synthetic;

/// Settings of this model that keep everything.
pub(super) fn settings(layers: usize, set: &[&str]) -> Settings {
    let layers_set = format!("model.layers={layers}");
    let model = [
        &layers_set,
        "recompute.spec=none",
        "model.hidden=128",
        "model.ffn=320",
    ];
    let config = config(&[&model[..], set].concat());
    let mut settings = Settings::new(&config).unwrap();
    settings.structure = architecture;
    settings.policy = Policy::keep_all_of(LABELS, layers);
    settings
}

fn chooser(settings: &Settings, offloads: bool, exhaustive: usize) -> Chooser {
    let paper = Paper::new(settings, Target::Cuda, Default::default());
    Chooser::of(settings.clone(), paper, offloads, exhaustive).unwrap()
}

/// Nanoseconds of processor time that this thread has used.
fn computed_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split(' ').next().unwrap().parse().unwrap()
}

/// Budgets from the lowest peak to that of keeping everything.
fn budgets(chooser: &Chooser, count: u64) -> impl Iterator<Item = u64> {
    let (least, most) = (
        chooser.smallest().unwrap().peak,
        chooser.keep_all.peak.bytes,
    );
    assert!(least < most);
    (0..=count).map(move |step| least + (most - least) * step / count)
}

/// A search is measured in steps on paper of the same thread, so the bound holds on slow and busy machines too.
#[test]
fn forty_eight_layers_of_four_kinds_take_less_than_two_thousand_steps_on_paper() {
    for offloads in [false, true] {
        let settings = settings(48, &[]);
        let before = computed_ns();
        let chooser = chooser(&settings, offloads, EXHAUSTIVE_MAX);
        let budget = budgets(&chooser, 2).nth(1).unwrap();
        let choice = chooser.within(budget).unwrap().unwrap();
        let searched = computed_ns() - before;
        let steps = 20;
        let before = computed_ns();
        for _ in 0..steps {
            chooser.paper.step(&settings).unwrap();
        }
        let ratio = searched * steps / (computed_ns() - before);
        assert!(ratio < 2000, "{ratio}");
        assert!(choice.peak_bytes <= budget);
        let policy = Policy::with_layers(LABELS, "none", &choice.layers, 48).unwrap();
        let planned = Plan::new(&Settings { policy, ..settings }, Target::Cuda).unwrap();
        assert_eq!(planned.peak_bytes, choice.peak_bytes);
    }
}

/// Compares with a search of all sets, for kinds of up to eleven labels.
#[test]
fn what_is_not_tried_loses_less_than_one_percent() {
    for (offloads, set) in [
        (false, &["attention.backend=eager"][..]),
        (false, &["attention.backend=flash", "train.dtype=bf16"]),
        (true, &["attention.backend=flash"]),
    ] {
        let settings = settings(8, set);
        let searched = chooser(&settings, offloads, EXHAUSTIVE_MAX);
        let exhaustive = chooser(&settings, offloads, LABELS.iter().count());
        let most = exhaustive
            .smallest()
            .unwrap()
            .peak
            .max(searched.smallest().unwrap().peak);
        for budget in budgets(&exhaustive, 24) {
            let best = exhaustive.within(budget.max(most)).unwrap().unwrap();
            let found = searched.within(budget.max(most)).unwrap().unwrap();
            assert!(found.peak_bytes <= budget.max(most));
            let ratio = found.step_ms / best.step_ms;
            assert!(ratio < 1.01, "{offloads} {budget}: {ratio}");
        }
        let [least, of_all] = [&searched, &exhaustive].map(|of| of.smallest().unwrap().peak);
        assert!((least as f64) < 1.01 * of_all as f64, "{least} {of_all}");
    }
}

/// As in DeepSeek's models, three dense blocks come first. They do not have the labels of the later blocks.
#[test]
fn later_kinds_choose_by_their_own_labels() {
    let settings = settings(12, &[]);
    let chooser = chooser(&settings, false, EXHAUSTIVE_MAX);
    let choice = chooser
        .within(chooser.smallest().unwrap().peak)
        .unwrap()
        .unwrap();
    let clauses: Vec<&String> = choice.layers.values().collect();
    assert!(
        clauses.iter().any(|text| text.contains("moe")),
        "{clauses:?}"
    );
    let mut before: Option<Choice> = None;
    for budget in budgets(&chooser, 12) {
        let choice = chooser.within(budget).unwrap().unwrap();
        assert!(choice.peak_bytes <= budget);
        if let Some(before) = before {
            assert!(
                choice.step_ms <= before.step_ms * (1.0 + 1e-9),
                "{before:?} {choice:?}"
            );
        }
        before = Some(choice);
    }
}
