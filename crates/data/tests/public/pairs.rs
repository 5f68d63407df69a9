//! Pairs: two rows that stay together, whatever the order.

use crate::fixture::{Folder, assert_says, open, open_error, options};
use data::{BesideTargets, Dataset, Inputs, MASKED, Options, Packing};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const SEQ: usize = 70;

/// Rows `first..first + rows`, which begin with their number and differ in length.
fn numbered(folder: &Folder, name: &str, first: i32, rows: i32) -> PathBuf {
    let all = first..first + rows;
    let ids: Vec<i32> = all.clone().flat_map(|row| [row; SEQ]).collect();
    let length = |row: i32| 1 + (row * 29) as usize % SEQ;
    let target = |row: i32, at: usize| if at < length(row) { 1 } else { MASKED };
    let targets: Vec<i32> = all
        .flat_map(|row| (0..SEQ).map(move |at| target(row, at)))
        .collect();
    let path = folder.batches(&ids, &targets, SEQ);
    let renamed = path.with_file_name(name);
    std::fs::rename(path, &renamed).unwrap();
    renamed
}

fn pairs<const N: usize>(paths: [&Path; N]) -> Options {
    let paths = paths.map(|path| path.display().to_string());
    Options {
        path: Some(Inputs::read(&paths).unwrap()),
        pairs: true,
        packing: Packing::Pad,
        shuffle: true,
        seq: Some(SEQ),
        micro_batch: 4,
        vocab: 100,
        ..options("")
    }
}

#[test]
fn they_stay_together_in_every_order() {
    let folder = Folder::new();
    let first = numbered(&folder, "first.safetensors", 0, 20);
    let second = numbered(&folder, "second.safetensors", 20, 8);
    for (options, rows) in [(pairs([&first]), 20), (pairs([&first, &second]), 28)] {
        for shuffle in [true, false] {
            let options = Options {
                shuffle,
                ..options.clone()
            };
            let dataset = Dataset::open(&options).unwrap();
            assert_eq!((dataset.samples(), dataset.rows()), (rows, rows));
            let numbers = (0..rows).map(|row| row as f32).collect();
            let mut batches = dataset.with_reference(numbers).batches();
            let (mut seen, mut lengths) = (BTreeSet::new(), BTreeSet::new());
            for _ in 0..rows / 4 {
                let step = batches.next_step().unwrap();
                let micro = &step.micro[0];
                assert_eq!(step.pairs(), 2);
                let firsts: Vec<i32> = micro.input_ids.iter().step_by(micro.seq).copied().collect();
                for pair in firsts.chunks(2) {
                    assert_eq!((pair[0] % 2, pair[1]), (0, pair[0] + 1), "{firsts:?}");
                }
                let known: Vec<f32> = firsts.iter().map(|row| *row as f32).collect();
                assert_eq!(micro.beside, Some(BesideTargets::Reference(known)));
                seen.extend(firsts);
                lengths.insert(micro.seq);
            }
            assert_eq!(seen.len(), rows, "each once");
            assert!(lengths.len() > 1, "pairs of like length come together");
        }
    }
}

#[test]
fn rows_without_another_are_refused() {
    let folder = Folder::new();
    let odd = numbered(&folder, "odd.safetensors", 0, 5);
    assert_says(&open_error(&pairs([&odd])), &["5 rows", "pair"]);
    let texts = folder.u16_tokens("texts.bin", 0..100);
    let texts = Options {
        format: data::Format::U16,
        ..pairs([&texts])
    };
    assert_says(&open_error(&texts), &["`chosen`", "`rejected`"]);
    drop(open(&Options {
        pairs: false,
        packing: Packing::Concatenate,
        ..texts
    }));
}

/// By their numbers, as what is known of each is written down.
#[test]
fn all_rows_come_by_their_numbers() {
    let folder = Folder::new();
    let first = numbered(&folder, "first.safetensors", 0, 6);
    let second = numbered(&folder, "second.safetensors", 6, 4);
    let dataset = Dataset::open(&pairs([&first, &second])).unwrap();
    let rows = dataset.by_number().map(|micro| {
        let micro = micro.unwrap();
        let firsts = micro.input_ids.iter().step_by(micro.seq).copied();
        firsts.collect::<Vec<i32>>()
    });
    assert_eq!(rows.collect::<Vec<_>>().concat(), Vec::from_iter(0..10));
}
