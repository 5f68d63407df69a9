//! Describes differences between ranks in things that must be equal.

use std::collections::{BTreeMap, BTreeSet};

/// The most differences in a sentence.
const MOST: usize = 4;

/// Which ranks have which values where others have different ones; none if all ranks have the same.
pub(super) fn sentence(all: &[BTreeMap<String, String>]) -> Option<String> {
    let names: BTreeSet<&String> = all.iter().flat_map(BTreeMap::keys).collect();
    let mut differences = names.into_iter().filter_map(|name| difference(name, all));
    let first: Vec<String> = differences.by_ref().take(MOST).collect();
    if first.is_empty() {
        return None;
    }
    let more = match differences.count() {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    Some(format!("{}{more}", first.join("; ")))
}

/// Such as `ranks 2 and 3 have batch.micro 2, rank 0 has 4`.
fn difference(name: &str, all: &[BTreeMap<String, String>]) -> Option<String> {
    let value = |facts: &BTreeMap<String, String>| facts.get(name).cloned();
    let of_first = value(all.first()?);
    let mut others: BTreeMap<Option<String>, Vec<usize>> = BTreeMap::new();
    for (rank, facts) in all.iter().enumerate() {
        if value(facts) != of_first {
            others.entry(value(facts)).or_default().push(rank);
        }
    }
    let show = |value: &Option<String>| value.clone().unwrap_or_else(|| "not set".into());
    let groups = others
        .iter()
        .map(|(value, ranks)| format!("{} {name} {}", who(ranks), show(value)));
    let groups: Vec<String> = groups.collect();
    (!groups.is_empty()).then(|| format!("{}, rank 0 has {}", groups.join(", "), show(&of_first)))
}

fn who(ranks: &[usize]) -> String {
    match ranks {
        [rank] => format!("rank {rank} has"),
        _ => {
            let ranks: Vec<String> = ranks.iter().map(ToString::to_string).collect();
            format!("ranks {} have", ranks.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        let pairs = pairs.iter();
        pairs
            .map(|(name, value)| (name.to_string(), value.to_string()))
            .collect()
    }

    #[test]
    fn ranks_with_the_same_are_named_together() {
        let (a, b) = (facts(&[("k", "1")]), facts(&[("k", "2")]));
        assert_eq!(sentence(&[a.clone(), a.clone()]), None);
        let told = sentence(&[a.clone(), b.clone(), a, b, facts(&[])]).unwrap();
        assert_eq!(
            told,
            "rank 4 has k not set, ranks 1, 3 have k 2, rank 0 has 1"
        );
    }

    #[test]
    fn a_sentence_ends() {
        let names: Vec<String> = (0..9).map(|key| key.to_string()).collect();
        let of = |value: &str| {
            names
                .iter()
                .map(|name| (name.clone(), value.to_owned()))
                .collect()
        };
        let told = sentence(&[of("a"), of("b")]).unwrap();
        assert_eq!(told.matches("rank 1 has").count(), MOST);
        assert!(told.ends_with("and 5 more"), "{told}");
    }
}
