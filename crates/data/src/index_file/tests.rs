//! Indices are written and read back, and invalid bytes are refused.

use super::*;
use proptest::prelude::*;

fn index() -> ShardIndex {
    ShardIndex {
        tokens: 100,
        documents: vec![0, 10, 50],
        masked: vec![3..5, 5..9, 90..100],
        text_bytes: 412,
        checksums: vec![7, 8],
    }
}

fn parse_error(change: impl FnOnce(&mut ShardIndex)) -> String {
    let mut index = index();
    change(&mut index);
    ShardIndex::parse(&index.to_bytes()).unwrap_err()
}

#[test]
fn entries_out_of_order_or_outside_are_named() {
    assert_eq!(ShardIndex::parse(&index().to_bytes()), Ok(index()));
    let said = parse_error(|index| index.documents = vec![0, 50, 50]);
    assert!(
        said.contains("document 2 begin at 50, not after 50"),
        "{said}"
    );
    let said = parse_error(|index| index.documents.push(100));
    assert!(
        said.contains("begin at 100, beyond the shard's 100 tokens"),
        "{said}"
    );
    let backwards = Range { start: 5, end: 2 };
    let bad = [90..101, 90..90, 89..91, backwards];
    for range in bad {
        let said = parse_error(|index| index.masked = vec![3..5, 5..9, 80..90, range.clone()]);
        let wanted = format!("masks {range:?} as range 3");
        assert!(said.contains(&wanted), "{said}");
    }
}

fn any_index() -> impl Strategy<Value = ShardIndex> {
    let documents = prop::collection::btree_set(0_u64..500, 0..20);
    let ends = prop::collection::btree_set(0_u64..=500, 0..20);
    let checksums = prop::collection::vec(any::<u32>(), 0..5);
    (documents, ends, checksums, any::<u64>()).prop_map(
        |(documents, ends, checksums, text_bytes)| {
            let ends: Vec<u64> = ends.into_iter().collect();
            ShardIndex {
                tokens: 500,
                documents: documents.into_iter().collect(),
                masked: ends
                    .as_chunks()
                    .0
                    .iter()
                    .map(|&[start, end]| start..end)
                    .collect(),
                text_bytes,
                checksums,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_is_read(index in any_index()) {
        prop_assert_eq!(ShardIndex::parse(&index.to_bytes()), Ok(index));
    }

    #[test]
    fn a_changed_bit_or_a_cut_is_always_seen(index in any_index(), at in any::<prop::sample::Index>(), bit in 0..8) {
        let whole = index.to_bytes();
        let at = at.index(whole.len());
        let mut flipped = whole.clone();
        flipped[at] ^= 1_u8 << bit;
        prop_assert!(ShardIndex::parse(&flipped).is_err());
        prop_assert!(ShardIndex::parse(&whole[..at]).is_err());
        prop_assert!(ShardIndex::parse(&[&whole[..], &[0]].concat()).is_err());
    }

    /// Random counts and entries, with a correct checksum.
    #[test]
    fn hostile_entries_are_refused_or_in_order(
        counts in prop::collection::vec(prop_oneof![0_u64..6, Just(1 << 20), Just(1 << 61), any::<u64>()], 6),
        entries in prop::collection::vec(prop_oneof![0_u64..9, any::<u64>()], 0..12),
    ) {
        let mut bytes = b"TRNRIDX1".to_vec();
        bytes.extend(counts.iter().chain(&entries).flat_map(|word| word.to_le_bytes()));
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        if let Ok(index) = ShardIndex::parse(&bytes) {
            prop_assert_eq!(index.check(), Ok(()));
            prop_assert_eq!(index.to_bytes(), bytes);
        }
    }
}
