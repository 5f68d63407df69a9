//! Documents in rows: first-fit, padded, and resumed anywhere.

use std::collections::BTreeMap;

use data::{
    CutDocuments, DataError, Dataset, Inputs, MASKED, MicroBatch, Options, Packing, Position,
    StepBatch, prefetch,
};
use proptest::prelude::*;

use crate::fixture::{Folder, assert_says, open, open_error, options};

/// Documents of these lengths, one after the other, in shards of `shard` tokens; token i is i.
fn documents(folder: &Folder, lengths: &[usize], shard: usize) -> Options {
    let starts = lengths.iter().scan(0, |next, length| {
        *next += length;
        Some(*next - length)
    });
    let starts: Vec<usize> = starts.collect();
    let tokens: usize = lengths.iter().sum();
    for (number, begin) in (0..tokens).step_by(shard).enumerate() {
        let end = tokens.min(begin + shard);
        let here = starts
            .iter()
            .filter(|&&start| (begin..end).contains(&start));
        let here: Vec<u64> = here.map(|start| (start - begin) as u64).collect();
        let ids: Vec<u16> = (begin..end).map(|token| token as u16).collect();
        folder.shard(&format!("train-{number:05}.bin"), &ids, &here, &[]);
    }
    Options {
        vocab: 65_536,
        ..options(folder.path())
    }
}

/// All micro-batches of the first epoch; `options` has one row a micro-batch.
fn epoch(options: &Options) -> Vec<MicroBatch> {
    let mut batches = open(options);
    let mut micro = Vec::new();
    while batches.position().epoch == 0 {
        micro.append(&mut batches.next_step().unwrap().micro);
    }
    micro
}

fn one_row(packing: Packing, seq: usize, options: Options) -> Options {
    Options {
        packing,
        seq: Some(seq),
        micro_batch: 1,
        ..options
    }
}

#[test]
fn first_fit_places_pieces_side_by_side() {
    let folder = Folder::new();
    // Inputs of 4, 2, 6 (cut into 5 and 1) and 3.
    let options = documents(&folder, &[5, 3, 7, 4], 100);
    let rows = epoch(&one_row(Packing::FirstFit, 5, options));
    let [first, second, third] = &rows[..] else {
        panic!("{} rows", rows.len())
    };
    assert_eq!(first.input_ids, [0, 1, 2, 3, 13]);
    assert_eq!(first.targets, [1, 2, 3, 4, 14]);
    assert_eq!(first.documents.as_deref(), Some(&[0, 0, 0, 0, 4][..]));
    assert_eq!(second.input_ids, [5, 6, 15, 16, 17]);
    assert_eq!(second.targets, [6, 7, 16, 17, 18]);
    assert_eq!(second.documents.as_deref(), Some(&[0, 0, 2, 2, 2][..]));
    assert_eq!(third.input_ids, [8, 9, 10, 11, 12]);
    assert_eq!(third.targets, [9, 10, 11, 12, 13]);
}

#[test]
fn padding_has_no_targets_and_sees_itself_alone() {
    let folder = Folder::new();
    let options = documents(&folder, &[4, 4], 100);
    let packed = Options {
        micro_batch: 2,
        ..one_row(Packing::FirstFit, 5, options.clone())
    };
    let micro = open(&packed).next_step().unwrap().micro.remove(0);
    assert_eq!(micro.input_ids, [0, 1, 2, 0, 0, 4, 5, 6, 0, 0]);
    assert_eq!(
        micro.targets,
        [1, 2, 3, MASKED, MASKED, 5, 6, 7, MASKED, MASKED]
    );
    assert_eq!(micro.documents, Some(vec![0, 0, 0, 3, 4, 0, 0, 0, 3, 4]));
    assert_eq!(micro.lengths, Some(vec![3, 3]));
    let whole = &epoch(&one_row(Packing::Concatenate, 5, options))[0];
    assert_eq!((&whole.documents, &whole.lengths), (&None, &None));
}

#[test]
fn padded_rows_are_documents_cut_to_seq_and_end_at_a_multiple_of_64() {
    let folder = Folder::new();
    let options = documents(&folder, &[11, 101, 301, 1], 1000);
    let rows = epoch(&one_row(Packing::Pad, 200, options));
    let shapes: Vec<_> = rows
        .iter()
        .map(|row| (row.seq, row.target_count(), row.input_ids[0]))
        .collect();
    let lengths: Vec<_> = rows.iter().flat_map(|row| row.lengths.clone()).collect();
    assert_eq!(lengths, [[10], [100], [200]]);
    assert_eq!(shapes, [(64, 10, 0), (128, 100, 11), (200, 200, 112)]);
    assert_eq!(rows[0].targets[9..11], [10, MASKED]);
    assert!(
        rows.iter()
            .all(|row| row.documents.is_none() && row.input_ids.len() == row.seq)
    );
}

#[test]
fn rows_of_similar_length_share_a_micro_batch() {
    let folder = Folder::new();
    let lengths: Vec<usize> = (0..256).map(|i| 2 + i * 97 % 251).collect();
    let tokens = |micro_batch, packing| {
        let options = Options {
            packing,
            seq: Some(256),
            micro_batch,
            shuffle: true,
            ..documents(&folder, &lengths, 65_000)
        };
        let micro = epoch(&options);
        let first = micro[0].seq;
        assert!(
            micro.iter().any(|micro| micro.seq != first),
            "lengths differ between micro-batches"
        );
        assert!(micro.iter().all(|micro| micro.rows == micro_batch));
        micro
            .iter()
            .map(|micro| micro.rows * micro.seq)
            .sum::<usize>()
    };
    // Rows alone are the least that rounding to 64 allows; without buckets nearly every micro-batch would be of 256.
    let (alone, together) = (tokens(1, Packing::Pad), tokens(8, Packing::Pad));
    assert!(
        together < alone * 106 / 100,
        "{together} tokens in micro-batches of 8, {alone} in rows alone"
    );
}

#[test]
fn padded_batch_files_lose_the_columns_that_nothing_asks_for() {
    let folder = Folder::new();
    let (ids, mut targets) = (vec![7; 4 * 100], vec![MASKED; 4 * 100]);
    // Last targets in columns 3, 80, none and 63.
    for (row, column) in [(0, 3), (1, 80), (3, 63)] {
        targets[row * 100 + column] = 9;
    }
    let padded = one_row(
        Packing::Pad,
        100,
        options(folder.batches(&ids, &targets, 100)),
    );
    let mut seqs: Vec<_> = {
        let padded = Options {
            accum: 4,
            ..padded.clone()
        };
        let step = open(&padded).next_step().unwrap();
        assert_eq!(step.target_count(), 3);
        step.micro
            .iter()
            .map(|micro| (micro.seq, micro.targets.len()))
            .collect()
    };
    seqs.sort_unstable();
    assert_eq!(seqs, [(64, 64), (64, 64), (64, 64), (100, 100)]);
    let packed = Options {
        packing: Packing::FirstFit,
        ..padded
    };
    assert_says(
        &open_error(&packed),
        &["\"first-fit\"", "is made of rows already", "concatenate"],
    );
}

#[test]
fn packing_needs_documents() {
    let folder = Folder::new();
    let text = options(folder.file("a.txt", &[b'x'; 1000]));
    let bare = options(folder.file(
        "a.bin",
        &crate::fixture::llmc_bytes(20240520, 1, 2, &[1, 0, 2, 0]),
    ));
    for packing in [Packing::FirstFit, Packing::Pad] {
        let error = |options: &Options| {
            open_error(&Options {
                packing,
                ..options.clone()
            })
        };
        assert_says(
            &error(&text),
            &[
                "a.txt",
                packing.name(),
                "does not say where",
                "trainer prepare",
            ],
        );
        assert_says(&error(&bare), &["a.bin", "has no .idx"]);
        let single = options(folder.shard("b.bin", &[1, 2], &[0, 1], &[]));
        assert_says(&error(&single), &["has no document of two tokens"]);
    }
}

#[test]
fn auto_keeps_documents_with_masks_apart() {
    let folders = [Folder::new(), Folder::new(), Folder::new()];
    let [masked, plain, text] = &folders;
    let ids: Vec<u16> = (0..20).collect();
    masked.shard("train-0.bin", &ids, &[0, 9], &[]);
    masked.shard("train-1.bin", &ids, &[0, 9], std::slice::from_ref(&(2..5)));
    plain.shard("train-0.bin", &ids, &[0, 9], &[]);
    let file = text.file("a.txt", &[b'x'; 100]);
    let bare = text.u16_tokens("bare.bin", 0..9);
    let paths = |paths: &[&std::path::Path]| {
        let paths = paths.iter().map(|path| path.display().to_string());
        Some(Inputs::read(&paths.collect::<Vec<_>>()).unwrap())
    };
    let auto = |path: Option<Inputs>| Options {
        path,
        packing: Packing::Auto,
        seq: Some(6),
        ..options("")
    };
    for (options, expected, reason) in [
        (auto(paths(&[masked.path()])), Packing::FirstFit, "learnt"),
        (
            auto(paths(&[&masked.path().join("train-1.bin")])),
            Packing::FirstFit,
            "learnt",
        ),
        (
            auto(paths(&[plain.path()])),
            Packing::Concatenate,
            "all tokens",
        ),
        (
            auto(paths(&[plain.path(), masked.path()])),
            Packing::FirstFit,
            "learnt",
        ),
        (
            auto(paths(&[masked.path(), &file])),
            Packing::Concatenate,
            "a.txt does not say",
        ),
        (
            auto(paths(&[&bare])),
            Packing::Concatenate,
            "bare.bin does not say",
        ),
        (auto(None), Packing::Concatenate, "built-in"),
    ] {
        let (packing, said) = options.decided_packing();
        assert_eq!(packing, expected, "{:?}: {said}", options.path);
        assert_says(&said, &[reason]);
        assert_eq!(
            options.has_documents(),
            !said.contains("say where") && !said.contains("built-in")
        );
        if !said.contains("bare.bin")
            && options
                .path
                .as_ref()
                .is_none_or(|paths| paths.only().is_some())
        {
            assert_eq!(Dataset::open(&options).unwrap().options().packing, expected);
        }
    }
    let pairs = Options {
        pairs: true,
        ..auto(paths(&[masked.path()]))
    };
    assert_eq!(pairs.decided_packing().0, Packing::Pad);
}

/// Documents of 9, 5 and 20 tokens, of which the last two, three and two are learnt.
fn answers(folder: &Folder) -> Options {
    let ids: Vec<u16> = (0..34).collect();
    folder.shard("train-0.bin", &ids, &[0, 9, 14], &[0..7, 9..11, 14..32]);
    options(folder.path())
}

#[test]
fn documents_that_are_cut_and_those_left_without_a_target_are_counted() {
    let folder = Folder::new();
    let count = |packing, seq| {
        let dataset = Dataset::open(&one_row(packing, seq, answers(&folder))).unwrap();
        (dataset.cut_documents(), dataset.describe_cut_documents())
    };
    let cut = |cut, emptied| CutDocuments {
        documents: 3,
        cut,
        emptied,
    };
    // The cut leaves the first document one of its two targets.
    let (counts, said) = count(Packing::Pad, 7);
    assert_eq!(counts, cut(2, 1));
    let words = [
        "2 of 3 documents",
        "--seq 7",
        "1 of them keep no token",
        "first-fit",
    ];
    assert_says(&said.unwrap(), &words);
    assert_eq!(count(Packing::Pad, 6).0, cut(2, 2));
    assert_eq!(count(Packing::FirstFit, 6).0, cut(2, 0));
    assert_eq!(count(Packing::Pad, 19), (cut(0, 0), None));
    assert_eq!(
        count(Packing::Concatenate, 6),
        (CutDocuments::default(), None)
    );
}

/// By reading nothing but indices, exactly those runs are refused that would end in a step without a target.
#[test]
fn a_step_without_a_target_is_found_before_the_run() {
    let folder = Folder::new();
    let (mut found, mut passed) = (0, 0);
    for packing in [Packing::Concatenate, Packing::FirstFit, Packing::Pad] {
        for (seq, shuffle, micro_batch) in
            [(4, false, 1), (4, true, 1), (6, true, 2), (7, false, 2)]
        {
            let options = Options {
                shuffle,
                micro_batch,
                ..one_row(packing, seq, answers(&folder))
            };
            let dataset = || Dataset::open(&options).unwrap();
            let mut batches = dataset().batches();
            for step in 1..=12 {
                let from = batches.position();
                let next = batches.next_step();
                let checked = [(from, 1), (Position::default(), step)].map(|(from, steps)| {
                    dataset()
                        .check_targets(from, steps)
                        .map_err(|error| error.to_string())
                });
                match next {
                    Ok(_) => {
                        assert_eq!(checked, [Ok(()), Ok(())], "{packing} {seq} step {step}");
                        passed += 1;
                    }
                    Err(error) => {
                        assert!(matches!(error, DataError::NoTargets { .. }), "{error}");
                        let error = Err(error.to_string());
                        assert_eq!(
                            checked,
                            [error.clone(), error],
                            "{packing} {seq} step {step}"
                        );
                        found += 1;
                        break;
                    }
                }
            }
        }
    }
    assert!(found > 3 && passed > 3, "{found} {passed}");
    let pad = Dataset::open(&one_row(Packing::Pad, 6, answers(&folder))).unwrap();
    let error = pad
        .check_targets(Position::default(), 3)
        .unwrap_err()
        .to_string();
    assert_says(&error, &["(epoch 0)", "2 of 3 documents", "raise --seq"]);
}

/// The steps and the positions after each.
fn steps(options: &Options, count: usize) -> Vec<(StepBatch, Position)> {
    let mut batches = open(options);
    (0..count)
        .map(|_| (batches.next_step().unwrap(), batches.position()))
        .collect()
}

#[test]
fn every_packing_resumes_after_every_step_whatever_is_read_ahead() {
    let folder = Folder::new();
    let lengths: Vec<usize> = (0..150).map(|i| 2 + i * 31 % 120).collect();
    let all = documents(&folder, &lengths, 700);
    for (packing, shuffle) in [Packing::Concatenate, Packing::FirstFit, Packing::Pad]
        .map(|packing| [(packing, false), (packing, true)])
        .concat()
    {
        let options = Options {
            packing,
            shuffle,
            seq: Some(100),
            micro_batch: 3,
            accum: 2,
            ..all.clone()
        };
        let whole = steps(&options, 40);
        assert!(
            whole[29].1.epoch >= 1,
            "{packing} goes on into another epoch"
        );
        for (done, (_, position)) in whole[..30].iter().enumerate() {
            let mut resumed = open(&options);
            resumed.seek(*position).unwrap();
            let mut resumed = prefetch(resumed, done % 4);
            for (step, after) in &whole[done + 1..done + 4] {
                assert_eq!(
                    &resumed.next_step().unwrap(),
                    step,
                    "{packing} {shuffle} after {done} steps"
                );
                assert_eq!(&resumed.position(), after);
            }
        }
    }
}

#[test]
fn first_fit_wastes_little() {
    let folder = Folder::new();
    let lengths: Vec<usize> = (0..600_usize)
        .map(|i| 2 + i.wrapping_mul(2_654_435_761) % 1000 % 199)
        .collect();
    let options = one_row(Packing::FirstFit, 256, documents(&folder, &lengths, 60_000));
    let dataset = Dataset::open(&options).unwrap();
    let inputs: usize = lengths.iter().map(|length| length - 1).sum();
    let most = inputs * 100 / 95 / 256;
    assert!(dataset.samples() <= most, "{} rows", dataset.samples());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    /// Each token but a document's first is a target once an epoch, after the token before it, and nothing else is.
    #[test]
    fn packed_targets_are_those_of_the_documents_alone(
        lengths in prop::collection::vec(1_usize..30, 1..120),
        seq in 1_usize..20,
        shard in 20_usize..400,
        shuffle in any::<bool>(),
        pad in any::<bool>(),
    ) {
        let folder = Folder::new();
        let packing = if pad { Packing::Pad } else { Packing::FirstFit };
        let options = Options { shuffle, ..one_row(packing, seq, documents(&folder, &lengths, shard)) };
        let mut wanted = BTreeMap::new();
        let mut token = 0;
        for &length in &lengths {
            let mut place = 0; // within the part of the document that a shard holds
            for _ in 0..length {
                place = if token % shard == 0 { 0 } else { place };
                if place > 0 && (!pad || place <= seq) {
                    wanted.insert(token as i32, 1);
                }
                place += 1;
                token += 1;
            }
        }
        prop_assume!(!wanted.is_empty());
        let mut found = BTreeMap::new();
        for row in epoch(&options) {
            prop_assert!(row.seq <= seq);
            prop_assert_eq!([row.input_ids.len(), row.targets.len()], [row.seq; 2]);
            for (place, (&input, &target)) in row.input_ids.iter().zip(&row.targets).enumerate() {
                let begin = row.documents.as_ref().map_or(0, |documents| documents[place] as usize);
                if target == MASKED {
                    prop_assert!(pad || begin == place);
                    continue;
                }
                prop_assert_eq!(input + 1, target);
                // Everything from the document's beginning on is one run of tokens.
                prop_assert_eq!(row.input_ids[begin] + (place - begin) as i32, input);
                *found.entry(target).or_insert(0) += 1;
            }
        }
        prop_assert_eq!(found, wanted);
    }
}
