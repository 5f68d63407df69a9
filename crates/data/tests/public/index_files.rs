//! The index beside a shard: written and read back, and no bytes of one make this crate panic or believe them.

use std::{fs, ops::Range};

use data::{BlockChecksums, ShardIndex};
use proptest::prelude::*;

use crate::fixture::{Folder, assert_says, open_error, options};

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
    assert_says(&said, &["document 2 begin at 50, not after 50"]);
    let said = parse_error(|index| index.documents.push(100));
    assert_says(&said, &["begin at 100, beyond the shard's 100 tokens"]);
    let backwards = Range { start: 5, end: 2 };
    let bad = [90..101, 90..90, 89..91, backwards];
    for range in bad {
        let shown = format!("masks {range:?} as range 3");
        assert_says(
            &parse_error(|index| index.masked = vec![3..5, 5..9, 80..90, range]),
            &[&shown],
        );
    }
}

#[test]
fn an_index_that_cannot_be_used_names_its_file_and_what_to_do() {
    let folder = Folder::new();
    let path = folder.shard("a.bin", &[1; 20], &[0], &[]);
    let file = ShardIndex::path(&path);
    let whole = fs::read(&file).unwrap();
    let error = |bytes: &[u8]| {
        fs::write(&file, bytes).unwrap();
        open_error(&options(&path))
    };
    let short = error(&whole[..30]);
    assert_says(
        &short,
        &["a.idx", "30 bytes", "trainer prepare", "remove all .idx"],
    );
    assert_says(&error(&whole[..whole.len() - 1]), &["a.idx", "cut short"]);
    assert_says(&error(b"MMIDIDX\0\0 and more"), &["a.idx", "TRNRIDX1"]);
    let mut changed = whole.clone();
    changed[60] ^= 1;
    assert_says(&error(&changed), &["a.idx", "its own checksum"]);

    let other = folder.shard("b.bin", &[1; 21], &[0], &[]);
    let other = error(&fs::read(ShardIndex::path(&other)).unwrap());
    assert_says(
        &other,
        &["a.idx", "21 tokens", "a.bin holds 20", "another file"],
    );
    let mut blocks = ShardIndex::parse(&whole).unwrap();
    blocks.checksums.push(1);
    assert_says(&error(&blocks.to_bytes()), &["2 checksums", "1 blocks"]);
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

    /// Counts and entries that lie, under a checksum that does not.
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

#[test]
fn checksums_do_not_depend_on_how_a_file_is_written() {
    const BLOCK: usize = ShardIndex::BLOCK_BYTES;
    let bytes: Vec<u8> = (0..2 * BLOCK + 1000).map(|i| (i % 251) as u8).collect();
    let wanted: Vec<u32> = bytes.chunks(BLOCK).map(crc32fast::hash).collect();
    for cuts in [
        &[][..],
        &[1],
        &[BLOCK],
        &[BLOCK - 1, BLOCK + 1, 2 * BLOCK],
        &[7, 7, 2 * BLOCK + 1],
    ] {
        let mut checksums = BlockChecksums::default();
        let mut from = 0;
        for &to in cuts.iter().chain([&bytes.len()]) {
            checksums.update(&bytes[from..to]);
            from = to;
        }
        assert_eq!(checksums.finish(), wanted, "cut at {cuts:?}");
    }
}
