//! Few runs in which every two choices meet.

use super::Random;
use std::collections::BTreeSet;

/// Two factors, by number, each with a choice.
pub type Pair = [(usize, usize); 2];

/// A choice for each factor.
pub type Choices = Vec<usize>;

/// Runs in which every two choices meet that go together, and the pairs that never do. `counts` is how many choices there
/// are for each factor. `go_together` is asked of some factors' choices: more of them never make what is wrong right.
pub fn covering(
    counts: &[usize],
    seed: u64,
    go_together: impl Fn(&[Option<usize>]) -> bool,
) -> (Vec<Choices>, BTreeSet<Pair>) {
    let mut random = Random(seed);
    let mut missing = all_pairs(counts);
    let (mut runs, mut never) = (Vec::new(), BTreeSet::new());
    while let Some(pair) = missing.first().copied() {
        let drawn = (0..200).filter_map(|_| draw(&mut random, counts, &pair, &go_together));
        let met = |choices: &Choices| pairs(choices).filter(|pair| missing.contains(pair)).count();
        match drawn.take(40).max_by_key(met) {
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
    let numbers = 0..choices.len();
    numbers.flat_map(move |second| {
        (0..second).map(move |first| [(first, choices[first]), (second, choices[second])])
    })
}

/// Some choices, and for the other factors, in random order, random ones that go with those before. None if none is left for a
/// factor.
pub fn draw(
    random: &mut Random,
    counts: &[usize],
    fixed: &[(usize, usize)],
    go_together: impl Fn(&[Option<usize>]) -> bool,
) -> Option<Choices> {
    let mut choices = vec![None; counts.len()];
    for (factor, choice) in fixed {
        choices[*factor] = Some(*choice);
    }
    if !go_together(&choices) {
        return None;
    }
    let mut open: Vec<usize> = (0..counts.len())
        .filter(|at| choices[*at].is_none())
        .collect();
    while !open.is_empty() {
        let factor = open.swap_remove(random.below(open.len() as u64) as usize);
        let first = random.below(counts[factor] as u64) as usize;
        let fits = |offset: &usize| {
            choices[factor] = Some((first + offset) % counts[factor]);
            go_together(&choices)
        };
        (0..counts[factor]).find(fits)?;
    }
    choices.into_iter().collect()
}
