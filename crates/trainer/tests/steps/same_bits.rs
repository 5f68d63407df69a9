//! Whatever is computed, loss, norm, weights and states have the same bits wherever anything lives, whatever is recomputed and whoever
//! computes it, and every rank's memory and traffic are what was planned for it.

use crate::common::factors::{Run, covering, refused};
use crate::common::ranks::{OfRank, each, of_rank, on_cpu, on_poisoned_cpu, together};
use crate::common::side_by_side::side_by_side;
use crate::common::{crossing, plan};
use memory::Rank;
use settings::Settings;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;

const STEPS: usize = 2;

/// Draws other runs.
const SEED: &str = "STEPS_SEED";

/// How often a choice did not show in plans, and how often it did.
type Seen = Mutex<BTreeMap<String, [usize; 2]>>;

fn seed() -> u64 {
    std::env::var(SEED).map_or(16, |seed| seed.parse().expect("a number"))
}

#[test]
fn of_a_process_alone() {
    compare_all(covering(false, seed()));
}

#[test]
fn of_ranks() {
    compare_all(covering(true, seed()));
}

#[test]
fn what_does_not_go_together_is_refused() {
    let refused = refused(seed());
    let accepted = refused
        .iter()
        .filter(|run| run.moved(Path::new("scratch")).is_ok());
    let accepted: Vec<String> = accepted.map(Run::to_string).collect();
    assert!(accepted.is_empty(), "{accepted:#?}");
}

/// All of them, so that what the wrong ones have in common shows.
fn compare_all(runs: Vec<Run>) {
    let seen = Seen::default();
    let right = side_by_side(runs.iter().enumerate(), |(number, run)| {
        let compared = catch_unwind(AssertUnwindSafe(|| compare(number, run, &seen)));
        compared.is_ok() || {
            println!("wrong: {run}");
            false
        }
    });
    let wrong = right.iter().filter(|is_right| !**is_right).count();
    assert_eq!(wrong, 0, "of {} runs", runs.len());
    for (choice, [hidden, shown]) in seen.into_inner().unwrap() {
        // A bucket may be larger than what goes in it, and a rank may be alone.
        let may_be_hidden = choice.starts_with("exchanges") || choice.starts_with("zero");
        let is_proved = shown > 0 && (hidden == 0 || may_be_hidden);
        assert!(is_proved, "{choice}: hidden {hidden}, shown {shown} times");
    }
}

fn compare(number: usize, run: &Run, seen: &Seen) {
    let folder = tempfile::tempdir().unwrap();
    let (reference, moved) = (run.reference(), run.moved(folder.path()).unwrap());
    assert_they_differ(number, run, folder.path(), seen);
    let name = run.to_string();
    let expected = each(&name, &reference, STEPS, on_cpu);
    let actual = each(&name, &moved, STEPS, on_poisoned_cpu);
    let replays = |ranks: &[OfRank]| ranks.iter().map(|rank| rank.replays).sum::<usize>();
    let replays = [
        replays(&expected),
        replays(&actual) / moved.sharing().rank.of,
    ];
    assert_eq!(replays[0] == replays[1], run.of("mode") == "none", "{run}");
    let tokens = STEPS * moved.accum * moved.micro_batch * moved.own_seq();
    for rank in &actual {
        assert_eq!(rank.tokens.iter().sum::<usize>(), tokens, "{run}");
        assert_eq!(rank.counted_bytes, rank.sent_bytes, "{run}");
        assert_eq!(rank.sent_bytes > 0, actual.len() > 1, "{run}");
    }
    let [expected, actual] = [expected, actual].map(|ranks| together(&ranks));
    let shown = |(_, loss, norm): (usize, u32, u32)| (loss, norm);
    assert_ne!(shown(expected.steps[0]), shown(expected.steps[1]), "{run}");
    assert_eq!(actual.steps, expected.steps, "{run}");
    assert_eq!(actual.shown, expected.shown, "{run}");
    assert!(actual.state == expected.state, "{run}");
}

/// One of the factors by which the sides of a comparison differ, another one in the next run, shows in plans.
fn assert_they_differ(number: usize, run: &Run, folder: &Path, seen: &Seen) {
    let undone = run.with_one_undone().into_iter();
    let possible = undone.filter_map(|(choice, run)| Some((choice, run.moved(folder).ok()?)));
    let possible: Vec<(String, Settings)> = possible.collect();
    if possible.is_empty() {
        return;
    }
    let (choice, undone) = &possible[number % possible.len()];
    let is_shown = figures(&run.moved(folder).unwrap()) != figures(undone);
    if !is_shown {
        println!("{choice} does not show in: {run}");
    }
    seen.lock().unwrap().entry(choice.clone()).or_default()[usize::from(is_shown)] += 1;
}

/// What plans say of memory and traffic: that of the last rank, and that of the first rank of each stage.
fn figures(settings: &Settings) -> Vec<String> {
    let Rank { of, .. } = settings.rank_of_all();
    let firsts = (0..of).step_by(settings.rank().of);
    let of_rank = |rank| {
        let plan = plan(&of_rank(settings, rank));
        let device = (
            plan.peak_by_category,
            plan.phase_peak_bytes,
            plan.slab_bytes,
        );
        let elsewhere = (plan.host_pinned_bytes, plan.disk_bytes, crossing(&plan));
        format!(
            "{device:?} {elsewhere:?} {:?} {:?}",
            plan.arenas, plan.host_arenas
        )
    };
    firsts.chain([of - 1]).map(of_rank).collect()
}
