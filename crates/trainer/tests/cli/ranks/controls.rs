//! What would pass if ranks did not divide the work, or if their order did not matter, does not.

use crate::ranks::job::{data, place, train, train_alone};

const WAY: &str = "--config llama.toml --zero 2 --bucket-size 8KiB";

/// Micro-batches handed out one after the other, instead of in turn, are added up in another order.
#[test]
fn handed_out_otherwise_the_bits_differ() {
    let place = place();
    let in_turn = train(&place, 2, WAY, "in-turn");
    place.file("data.safetensors", data(&[0, 2, 1, 3], None));
    let in_blocks = train(&place, 2, WAY, "in-blocks");
    let alone = train_alone(&place, WAY, "alone");
    assert!(in_turn.bits() != in_blocks.bits());
    assert!(alone.bits() == in_blocks.bits());
    let mean = |run: &crate::ranks::job::Run| run.metrics.losses()[0];
    let difference = (mean(&in_turn) - mean(&in_blocks)).abs();
    assert!(difference < 1e-5, "the same samples: {difference}");
}

/// A rank's own rows count, and are counted by it alone.
#[test]
fn rows_belong_to_a_rank() {
    let place = place();
    let plain = train(&place, 4, WAY, "plain");
    for rank in 0..4 {
        place.file("data.safetensors", data(&[0, 1, 2, 3], Some(rank)));
        let altered = train(&place, 4, WAY, &format!("altered-{rank}"));
        assert_ne!(
            plain.metrics.losses()[0],
            altered.metrics.losses()[0],
            "rank {rank}"
        );
    }
    let targets: Vec<u64> = (0..4).map(|rank| plain.field(rank, "tokens")[0]).collect();
    assert!(
        targets.is_sorted_by(|a, b| a > b),
        "masks are uneven: {targets:?}"
    );
    assert_eq!(targets[0], 48, "no target of the first is masked");
}

/// Each rank replays what its own micro-batches need: together as much as one process.
#[test]
fn a_step_is_divided() {
    let place = place();
    let way = format!("{WAY} --recompute full");
    let alone = train_alone(&place, &way, "alone");
    let replayed =
        |run: &crate::ranks::job::Run, rank: usize| run.ranks[rank].steps()[0]["replayed"].clone();
    let whole = replayed(&alone, 0);
    for ranks in [2, 4] {
        let run = train(&place, ranks, &way, &format!("ranks-{ranks}"));
        for rank in 0..ranks {
            for (stage, count) in replayed(&run, rank).as_object().unwrap() {
                let part = count.as_u64().unwrap() * ranks as u64;
                assert_eq!(
                    part,
                    whole[stage].as_u64().unwrap(),
                    "{stage} of rank {rank} of {ranks}"
                );
            }
        }
    }
    assert!(whole.as_object().unwrap().values().any(|count| *count != 0));
}

/// Adding up once a step sends less, and gives other bits: the same ones at both stages that have it.
#[test]
fn reducing_once_a_step() {
    let place = place();
    let run = |zero: usize, reduce: &str| {
        let arguments = format!("--config llama.toml --zero {zero} --reduce {reduce}");
        train(&place, 2, &arguments, &format!("{reduce}-{zero}"))
    };
    let (replicated, states) = (run(0, "step"), run(1, "step"));
    assert!(replicated.bits() == states.bits());
    let each = run(1, "micro-batch");
    assert!(each.bits() != states.bits());
    let sent = |run: &crate::ranks::job::Run| run.field(0, "sent_bytes")[0];
    assert!(
        sent(&states) < sent(&each),
        "{} and {}",
        sent(&states),
        sent(&each)
    );
}

/// What the engine was handed is what the steps counted.
#[test]
fn the_engine_counts_the_same_bytes() {
    let place = place();
    for zero in [0, 3] {
        let run = train(
            &place,
            2,
            &format!("--config llama.toml --zero {zero}"),
            &format!("zero-{zero}"),
        );
        for rank in 0..2 {
            let counted: u64 = run.field(rank, "sent_bytes").iter().sum();
            let end = run.ranks[rank].of_kind("ranks").next().unwrap();
            let handed = end["sent_bytes"].as_u64().unwrap();
            assert!(
                counted > 0 && end["engine"].as_str().unwrap().contains("Open MPI"),
                "{end}"
            );
            // At stage 3 the weights are gathered once more, to be saved.
            assert!(
                if zero == 3 {
                    handed > counted
                } else {
                    handed == counted
                },
                "{handed} and {counted}"
            );
        }
    }
}
