//! Writes equal leases of several blocks in one line, so that the live leases of a model with 126 blocks stay readable.
//!
//! A lease is identified by its text, such as "`x` (activation; block 3, forward)". The folded text "`x` (activation;
//! blocks 0-30, 40, forward)" stands for one lease in each of these blocks, each with the given bytes.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;

/// A lease, or equal leases of several blocks.
#[derive(Debug, PartialEq)]
pub(crate) struct Folded<B> {
    pub(crate) name: String,
    /// Bytes of each lease, or by how much they changed.
    pub(crate) bytes: B,
    pub(crate) count: usize,
}

/// Folds leases that differ only in their block.
pub(crate) fn fold<'a, B: Copy + Ord>(
    leases: impl Iterator<Item = (&'a str, B)>,
) -> Vec<Folded<B>> {
    let mut folded = Vec::new();
    let mut alike: BTreeMap<(&str, &str, B), Vec<usize>> = BTreeMap::new();
    for (name, bytes) in leases {
        match around_block(name) {
            Some((before, block, after)) => {
                alike.entry((before, after, bytes)).or_default().push(block);
            }
            None => folded.push(Folded {
                name: name.into(),
                bytes,
                count: 1,
            }),
        }
    }
    folded.extend(alike.into_iter().map(|((before, after, bytes), blocks)| {
        let count = blocks.len();
        let word = if count == 1 { "block" } else { "blocks" };
        let name = format!("{before}; {word} {}, {after}", ranges(blocks));
        Folded { name, bytes, count }
    }));
    folded
}

/// The text before the block in a lease's name, the block, and the text after it.
fn around_block(name: &str) -> Option<(&str, usize, &str)> {
    let (before, rest) = name.split_once("; block ")?;
    let (block, after) = rest.split_once(", ")?;
    Some((before, block.parse().ok()?, after))
}

/// Numbers as ranges, such as "0-30, 40".
fn ranges(mut blocks: Vec<usize>) -> String {
    blocks.sort_unstable();
    let runs = blocks.chunk_by(|block, next| block + 1 == *next);
    let runs = runs.map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        _ => run[0].to_string(),
    });
    runs.collect::<Vec<_>>().join(", ")
}

/// The names of the single leases; none if the name is not folded.
fn unfold(name: &str) -> Option<Vec<String>> {
    let (before, rest) = name.split_once("; blocks ")?;
    let (blocks, after) = rest.rsplit_once(", ")?;
    let mut names = Vec::new();
    for run in blocks.split(", ") {
        let (first, last) = run.split_once('-').unwrap_or((run, run));
        for block in first.parse::<usize>().ok()?..=last.parse().ok()? {
            names.push(format!("{before}; block {block}, {after}"));
        }
    }
    Some(names)
}

/// Writes the bytes of leases, folded.
pub(crate) fn serialize<S: Serializer>(
    leases: &BTreeMap<String, u64>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let folded = fold(leases.iter().map(|(name, bytes)| (name.as_str(), *bytes)));
    let folded = folded.into_iter().map(|lease| (lease.name, lease.bytes));
    folded.collect::<BTreeMap<_, _>>().serialize(serializer)
}

/// Reads what [`serialize`] writes.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, u64>, D::Error> {
    let folded = BTreeMap::<String, u64>::deserialize(deserializer)?;
    let leases = folded.into_iter().flat_map(|(name, bytes)| {
        let names = unfold(&name).unwrap_or_else(|| vec![name]);
        names.into_iter().map(move |name| (name, bytes))
    });
    Ok(leases.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_are_alike_are_one_line_and_come_back() {
        let lease =
            |block: usize, bytes| (format!("`x` (activation; block {block}, forward)"), bytes);
        let mut leases: BTreeMap<String, u64> = (0..12).map(|block| lease(block, 64)).collect();
        leases.extend([lease(20, 64), lease(21, 32)]);
        leases.insert("`x` (activation; head, forward)".into(), 64);
        let written = serialize(&leases, serde_json::value::Serializer).unwrap();
        let expected = serde_json::json!({
            "`x` (activation; block 21, forward)": 32,
            "`x` (activation; blocks 0-11, 20, forward)": 64,
            "`x` (activation; head, forward)": 64,
        });
        assert_eq!(written, expected);
        assert_eq!(deserialize(written).unwrap(), leases);
    }

    #[test]
    fn names_that_hold_no_blocks_stay() {
        for name in ["`x`", "`x` (a; blocks 3)", "`x` (a; blocks 1-b, forward)"] {
            assert_eq!(unfold(name), None);
        }
    }
}
