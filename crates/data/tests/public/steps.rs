//! The sequence of steps: epochs, shuffling, resuming, reading ahead.

use std::collections::BTreeSet;

use data::{DataError, MASKED, Options, Packing, Position, StepBatch, prefetch};

use crate::fixture::{Folder, open, options};

/// Data of `samples` samples of 2 tokens; sample i begins with token `2 * i`.
fn numbered(folder: &Folder, samples: u16) -> Options {
    Options {
        format: data::Format::U16,
        seq: Some(2),
        ..options(folder.u16_tokens("numbered.bin", 0..=2 * samples))
    }
}

/// Which samples of [`numbered`] a step took, micro-batch by micro-batch.
fn samples(step: &StepBatch) -> Vec<Vec<i32>> {
    let rows = |m: &data::MicroBatch| m.input_ids.chunks(2).map(|row| row[0] / 2).collect();
    step.micro.iter().map(rows).collect()
}

fn epoch(options: &Options, epoch: u64) -> Vec<i32> {
    let mut batches = open(options);
    let count = batches.dataset().samples();
    batches.seek(Position { epoch, index: 0 }).unwrap();
    let steps = (0..count).map(|_| samples(&batches.next_step().unwrap()).concat());
    steps.collect::<Vec<_>>().concat()
}

#[test]
fn file_order_runs_on_into_the_next_epoch_within_a_micro_batch() {
    let folder = Folder::new();
    let mut batches = open(&Options {
        accum: 2,
        ..numbered(&folder, 5)
    });
    let steps: Vec<_> = (0..3)
        .map(|_| samples(&batches.next_step().unwrap()))
        .collect();
    assert_eq!(
        steps,
        [[[0, 1], [2, 3]], [[4, 0], [1, 2]], [[3, 4], [0, 1]]]
    );
    assert_eq!(batches.position(), Position { epoch: 2, index: 2 });
}

#[test]
fn a_step_larger_than_the_data_takes_several_epochs() {
    let folder = Folder::new();
    let mut batches = open(&Options {
        micro_batch: 7,
        ..numbered(&folder, 3)
    });
    let step = batches.next_step().unwrap();
    assert_eq!(samples(&step), [[0, 1, 2, 0, 1, 2, 0]]);
    assert_eq!(batches.position(), Position { epoch: 2, index: 1 });
}

#[test]
fn shuffled_epochs_hold_every_sample_once_in_an_order_of_their_own() {
    let folder = Folder::new();
    let shuffled = Options {
        shuffle: true,
        micro_batch: 1,
        ..numbered(&folder, 50)
    };
    let orders: BTreeSet<_> = (0..4).map(|e| epoch(&shuffled, e)).collect();
    assert_eq!(orders.len(), 4, "each epoch has its own order");
    let every: BTreeSet<_> = (0..50).collect();
    for order in orders {
        assert_eq!(order.len(), 50);
        assert_eq!(order.into_iter().collect::<BTreeSet<_>>(), every);
    }

    let other_seed = Options {
        seed: 2,
        ..shuffled.clone()
    };
    assert_ne!(epoch(&shuffled, 0), epoch(&other_seed, 0));
    assert_eq!(epoch(&shuffled, 3), epoch(&shuffled, 3));
}

#[test]
fn the_order_does_not_depend_on_how_samples_are_grouped() {
    let folder = Folder::new();
    let taken = |micro_batch, accum, steps| {
        let mut batches = open(&Options {
            shuffle: true,
            micro_batch,
            accum,
            ..numbered(&folder, 10)
        });
        let steps = (0..steps).map(|_| samples(&batches.next_step().unwrap()).concat());
        steps.collect::<Vec<_>>().concat()
    };
    assert_eq!(taken(4, 3, 2), taken(1, 1, 24));
}

#[test]
fn seeking_to_a_saved_position_resumes_the_same_sequence() {
    let folder = Folder::new();
    for shuffle in [false, true] {
        let options = Options {
            shuffle,
            micro_batch: 3,
            ..numbered(&folder, 7)
        };
        let mut whole = open(&options);
        for _ in 0..4 {
            whole.next_step().unwrap();
        }
        let saved = serde_json::to_string(&whole.position()).unwrap();
        assert_eq!(saved, r#"{"epoch":1,"index":5}"#);

        let mut resumed = open(&options);
        resumed.seek(serde_json::from_str(&saved).unwrap()).unwrap();
        for _ in 0..5 {
            assert_eq!(resumed.next_step().unwrap(), whole.next_step().unwrap());
            assert_eq!(resumed.position(), whole.position());
        }
    }
}

#[test]
fn a_position_beyond_the_data_is_refused() {
    let folder = Folder::new();
    let mut batches = open(&numbered(&folder, 5));
    let error = batches.seek(Position { epoch: 1, index: 5 }).unwrap_err();
    assert!(matches!(error, DataError::NoSuchPosition { .. }));
    let message = error.to_string();
    assert!(message.contains("sample 5 of epoch 1"), "{message}");
    assert!(message.contains("5 samples an epoch"), "{message}");
    assert_eq!(batches.position(), Position::default());
}

#[test]
fn the_last_epoch_there_is_can_be_read() {
    let folder = Folder::new();
    let mut batches = open(&numbered(&folder, 3));
    let epoch = u64::MAX;
    batches.seek(Position { epoch, index: 2 }).unwrap();
    assert_eq!(samples(&batches.next_step().unwrap()), [[2, 0]]);
}

#[test]
fn reading_ahead_changes_neither_steps_nor_positions() {
    let folder = Folder::new();
    let options = Options {
        shuffle: true,
        micro_batch: 3,
        accum: 2,
        ..numbered(&folder, 20)
    };
    for depth in [0, 1, 4] {
        let mut plain = open(&options);
        plain.seek(Position { epoch: 1, index: 9 }).unwrap();
        let mut source = open(&options);
        source.seek(plain.position()).unwrap();
        let mut ahead = prefetch(source, depth);
        for _ in 0..12 {
            assert_eq!(ahead.position(), plain.position());
            assert_eq!(ahead.next_step().unwrap(), plain.next_step().unwrap());
        }
        assert_eq!(ahead.position(), plain.position());
    }
}

#[test]
fn reading_ahead_gives_an_error_at_its_own_step_and_again_after_it() {
    let folder = Folder::new();
    let path = folder.batches(&[1, 2, 3, 4], &[1, 2, MASKED, MASKED], 2);
    let options = Options {
        micro_batch: 1,
        ..options(path)
    };
    let mut ahead = prefetch(open(&options), 3);
    ahead.next_step().unwrap();
    for _ in 0..2 {
        let error = ahead.next_step().unwrap_err();
        assert!(matches!(error, DataError::NoTargets { .. }), "{error}");
        assert_eq!(ahead.position(), Position { epoch: 0, index: 1 });
    }
}

/// What a rank reads of a step is what a process alone does, and of the rest it knows the shape: so all go by the same lengths
/// and positions.
#[test]
fn a_rank_reads_its_own_micro_batches_and_knows_the_shape_of_the_others() {
    let folder = Folder::new();
    let ends: Vec<u64> = (1..60).map(|end| end * end).collect();
    let tokens: Vec<u16> = (0..3600).map(|token| token % 500).collect();
    let masked = 40..90;
    let path = folder.shard("data.bin", &tokens, &ends, std::slice::from_ref(&masked));
    for packing in [Packing::Concatenate, Packing::FirstFit, Packing::Pad] {
        let options = Options {
            seq: Some(128),
            accum: 6,
            shuffle: true,
            packing,
            ..options(path.clone())
        };
        let mut alone = open(&options);
        let mut ranks: Vec<_> = (0..3).map(|rank| open(&options).of_rank(rank, 3)).collect();
        for _ in 0..8 {
            let whole = alone.next_step().unwrap();
            let mut targets = 0;
            for (rank, batches) in ranks.iter_mut().enumerate() {
                let step = batches.next_step().unwrap();
                assert_eq!(batches.position(), alone.position());
                targets += step.target_count();
                for (number, (micro, read)) in step.micro.iter().zip(&whole.micro).enumerate() {
                    assert_eq!(
                        (micro.rows, micro.seq),
                        (read.rows, read.seq),
                        "{packing:?}"
                    );
                    match number % 3 == rank {
                        true => assert_eq!(micro, read, "{packing:?}"),
                        false => assert!(micro.input_ids.is_empty() && micro.targets.is_empty()),
                    }
                }
            }
            assert_eq!(targets, whole.target_count());
        }
    }
}

#[test]
fn what_is_wrong_with_a_row_is_met_by_the_rank_that_reads_it() {
    let folder = Folder::new();
    let path = folder.batches(&[1, 2, 3, 4, 5, 600, 7, 8], &[MASKED; 8], 2);
    let options = Options {
        micro_batch: 1,
        accum: 4,
        vocab: 500,
        ..options(path)
    };
    let of_rank = |rank| open(&options).of_rank(rank, 4).next_step();
    let step = of_rank(1).unwrap();
    assert_eq!(step.target_count(), 0, "other ranks may have some");
    let error = of_rank(2).unwrap_err();
    assert!(
        matches!(error, DataError::EntryOutOfRange { token: 600, .. }),
        "{error}"
    );
}
