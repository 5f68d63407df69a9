//! Few runs in which every two choices meet.

use super::Random;
use std::collections::BTreeSet;

/// Two factors, by number, each with a choice.
pub type Pair = [(usize, usize); 2];

/// A choice for each factor.
pub type Choices = Vec<usize>;

/// Runs in which every two choices meet that go together, and the pairs that never do. `counts` is how many choices there
/// are for each factor.
pub fn covering(
    counts: &[usize],
    seed: u64,
    go_together: impl Fn(&Choices) -> bool,
) -> (Vec<Choices>, BTreeSet<Pair>) {
    let mut random = Random(seed);
    let mut missing = all_pairs(counts);
    let (mut runs, mut never) = (Vec::new(), BTreeSet::new());
    while let Some(pair) = missing.first().copied() {
        let drawn = (0..300).map(|_| draw(&mut random, counts, &pair));
        let fitting = drawn.filter(|choices| go_together(choices)).take(40);
        let met = |choices: &Choices| pairs(choices).filter(|pair| missing.contains(pair)).count();
        match fitting.max_by_key(met) {
            Some(best) => {
                pairs(&best).for_each(|pair| {
                    missing.remove(&pair);
                });
                runs.push(best);
            }
            None => {
                missing.remove(&pair);
                never.insert(pair);
            }
        }
    }
    (runs, never)
}

fn all_pairs(counts: &[usize]) -> BTreeSet<Pair> {
    let mut all = BTreeSet::new();
    for (second, seconds) in counts.iter().enumerate() {
        for (first, firsts) in counts[..second].iter().enumerate() {
            let pairs = (0..*firsts)
                .flat_map(|one| (0..*seconds).map(move |other| [(first, one), (second, other)]));
            all.extend(pairs);
        }
    }
    all
}

fn pairs(choices: &Choices) -> impl Iterator<Item = Pair> {
    let chosen: Vec<(usize, usize)> = choices.iter().copied().enumerate().collect();
    let numbers = 0..chosen.len();
    numbers.flat_map(move |second| {
        let chosen = chosen.clone();
        (0..second).map(move |first| [chosen[first], chosen[second]])
    })
}

/// Chosen at random, but for two of them.
fn draw(random: &mut Random, counts: &[usize], fixed: &Pair) -> Choices {
    let one = |count: &usize| random.below(*count as u64) as usize;
    let mut choices: Choices = counts.iter().map(one).collect();
    for (factor, choice) in fixed {
        choices[*factor] = *choice;
    }
    choices
}
