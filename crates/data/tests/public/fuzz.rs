//! No bytes make this crate panic, and whatever it gives is in the vocabulary.

use data::{Dataset, Format, MASKED, Options, Packing};
use proptest::prelude::*;

use crate::fixture::{Folder, llmc_bytes, options};

const FORMATS: [Format; 5] = [
    Format::Auto,
    Format::Text,
    Format::U16,
    Format::LlmC,
    Format::Batches,
];

const PACKINGS: [Packing; 3] = [Packing::Concatenate, Packing::FirstFit, Packing::Pad];

/// Opens the bytes in every format and packing and takes a few steps.
fn read_every_way(bytes: &[u8], seq: Option<usize>, vocab: usize) {
    let folder = Folder::new();
    for name in ["f.bin", "f.safetensors", "f.txt"] {
        let path = folder.file(name, bytes);
        for (format, packing) in FORMATS
            .into_iter()
            .flat_map(|format| PACKINGS.map(|packing| (format, packing)))
        {
            let options = Options {
                format,
                packing,
                pairs: false,
                seq,
                shuffle: vocab.is_multiple_of(2),
                vocab,
                ..options(&path)
            };
            let Ok(dataset) = Dataset::open(&options) else {
                continue;
            };
            let mut batches = dataset.batches();
            for _ in 0..3 {
                let Ok(step) = batches.next_step() else {
                    break;
                };
                assert!(step.target_count() > 0);
                let known = |id: i32| usize::try_from(id).is_ok_and(|id| id < vocab);
                for micro in &step.micro {
                    assert_eq!(micro.input_ids.len(), micro.rows * micro.seq);
                    assert_eq!(micro.targets.len(), micro.rows * micro.seq);
                    assert!(micro.input_ids.iter().all(|&id| known(id)));
                    assert!(micro.targets.iter().all(|&id| id == MASKED || known(id)));
                }
            }
        }
    }
}

/// Safetensors headers that are nearly right.
fn header() -> impl Strategy<Value = String> {
    let size = prop_oneof![0_u64..5, Just(u64::MAX), Just((1 << 61) - 1), any::<u64>()];
    let dtype = prop::sample::select(vec!["I32", "I64", "F32", "F4", "BOOL", "X"]);
    let name = prop::sample::select(vec!["input_ids", "targets", "other"]);
    let shape = prop::collection::vec(size.clone(), 0..4);
    let tensor = (name, dtype, shape, size.clone(), size).prop_map(|(name, dtype, shape, a, b)| {
        format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{a},{b}]}}"#)
    });
    prop::collection::vec(tensor, 0..4).prop_map(|tensors| format!("{{{}}}", tensors.join(",")))
}

/// A well-formed batch file of `rows` by `seq` arbitrary entries.
fn batch_file(rows: usize, seq: usize, entries: &[u8]) -> Vec<u8> {
    let half = rows * seq * 4;
    let header = format!(
        r#"{{"input_ids":{{"dtype":"I32","shape":[{rows},{seq}],"data_offsets":[0,{half}]}},
            "targets":{{"dtype":"I32","shape":[{rows},{seq}],"data_offsets":[{half},{}]}}}}"#,
        2 * half
    );
    let data = entries.iter().copied().cycle().take(2 * half).collect();
    with_header(&header, data)
}

fn with_header(header: &str, data: Vec<u8>) -> Vec<u8> {
    let length = (header.len() as u64).to_le_bytes();
    [length.to_vec(), header.as_bytes().to_vec(), data].concat()
}

fn bytes(most: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..most)
}

fn seq() -> impl Strategy<Value = Option<usize>> {
    prop_oneof![
        Just(None),
        (0_usize..9).prop_map(Some),
        Just(Some(usize::MAX))
    ]
}

fn vocab() -> impl Strategy<Value = usize> {
    prop_oneof![0_usize..300, Just(65_536), Just(usize::MAX)]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 200,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn arbitrary_bytes(bytes in bytes(200), seq in seq(), vocab in vocab()) {
        read_every_way(&bytes, seq, vocab);
    }

    #[test]
    fn arbitrary_llmc_headers(
        magic in prop_oneof![Just(20240520), Just(20240801), any::<i32>()],
        version in prop_oneof![Just(1), Just(7), any::<i32>()],
        count in prop_oneof![0..20, any::<i32>()],
        tokens in bytes(60),
        cut in 0_usize..1100,
        seq in seq(),
        vocab in vocab(),
    ) {
        let bytes = llmc_bytes(magic, version, count, &tokens);
        read_every_way(&bytes, seq, vocab);
        read_every_way(&bytes[..cut.min(bytes.len())], seq, vocab);
    }

    #[test]
    fn arbitrary_safetensors_headers(header in header(), data in bytes(60), seq in seq()) {
        read_every_way(&with_header(&header, data), seq, 256);
    }

    #[test]
    fn arbitrary_batch_entries(
        rows in 0_usize..4,
        seq in 0_usize..4,
        entries in prop::collection::vec(prop_oneof![Just(0_u8), Just(156), Just(255), any::<u8>()], 1..40),
        length_change in -2_i64..3,
        vocab in vocab(),
    ) {
        let mut bytes = batch_file(rows, seq, &entries);
        bytes.resize(bytes.len().saturating_add_signed(length_change as isize), 0);
        read_every_way(&bytes, None, vocab);
    }
}
