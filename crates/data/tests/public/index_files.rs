//! Shards and the index beside them: what is written is read, and what cannot be used is named.

use std::fs;

use data::{ShardIndex, ShardWriter};

use crate::fixture::{Folder, assert_says, open_error, options};

#[test]
fn an_index_that_cannot_be_used_names_its_file_and_what_to_do() {
    let folder = Folder::new();
    let path = folder.shard("a.bin", &[1; 20], &[0], &[]);
    let file = path.with_extension("idx");
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
    let other = error(&fs::read(other.with_extension("idx")).unwrap());
    assert_says(
        &other,
        &["a.idx", "21 tokens", "a.bin holds 20", "another file"],
    );
    let mut blocks = whole[..whole.len() - 4].to_vec();
    blocks[48] += 1; // checksums
    blocks.extend([0; 4]);
    blocks.extend(crc32fast::hash(&blocks).to_le_bytes());
    assert_says(&error(&blocks), &["2 checksums", "1 blocks"]);
}

#[test]
fn shards_do_not_depend_on_how_they_are_written() {
    const BLOCK: usize = ShardIndex::BLOCK_BYTES;
    let tokens: Vec<u32> = (0..BLOCK as u32 + 1000).map(|i| i % 251).collect();
    let folder = Folder::new();
    let in_first = (BLOCK - 1024) / 2; // tokens of u16 in the first block, after the header
    let mut first = None;
    for cuts in [
        &[][..],
        &[1],
        &[in_first],
        &[in_first - 1, in_first + 1, in_first + BLOCK / 2],
        &[0, 0, tokens.len()],
    ] {
        let mut shard = ShardWriter::create(folder.path(), "a", 251).unwrap();
        shard.start_document();
        let mut from = 0;
        for &to in cuts.iter().chain([&tokens.len()]) {
            let text_bytes = (to - from) as u64;
            shard.push(&tokens[from..to], [], text_bytes).unwrap();
            from = to;
        }
        let index = shard.finish().unwrap();
        let path = folder.path().join("a.bin");
        assert_eq!(ShardIndex::beside(&path).unwrap(), index);
        let bytes = fs::read(&path).unwrap();
        let wanted: Vec<u32> = bytes.chunks(BLOCK).map(crc32fast::hash).collect();
        assert_eq!(wanted.len(), 3);
        assert_eq!(index.checksums, wanted, "cut at {cuts:?}");
        assert_eq!(index.documents, [0]);
        assert_eq!(first.get_or_insert_with(|| bytes.clone()), &bytes);
    }
}

#[test]
fn a_shard_that_is_not_finished_is_not_taken_for_one() {
    let folder = Folder::new();
    let mut shard = ShardWriter::create(folder.path(), "a", 70_000).unwrap();
    shard.push(&[69_999; 5000], [], 0).unwrap();
    let outside = shard.push(&[70_000], [], 0).unwrap_err().to_string();
    assert_says(&outside, &["a.bin", "70000", "vocabulary"]);
    drop(shard);
    let path = folder.path().join("a.bin");
    assert_says(&open_error(&options(&path)), &["a.bin", "magic 0"]);

    let mut shard = ShardWriter::create(folder.path(), "a", 70_000).unwrap();
    shard.push(&[1; 10], [3..5, 4..6], 0).unwrap();
    assert_says(&shard.finish().unwrap_err().to_string(), &["a.bin", "4..6"]);
}
