//! What ranks divide: how much less each has and sends.

use crate::common::elsewhere::{forms, models, with_form, with_optimizer};
use crate::common::plan;
use crate::common::ranks::{Together, each, of_rank, on_cpu, ranks, together};
use memory::{DType, Home, Homes, Rank, Window};
use model::Architecture;
use optim::OptimizerKind;
use settings::Settings;
use units::{Ranks, Reduce, Zero};

const STEPS: usize = 3;

/// Micro-batches of a step, over all ranks.
const MICRO_BATCHES: usize = 4;

fn run(name: &str, settings: &Settings) -> Together {
    let ranks = each(name, settings, STEPS, on_cpu);
    let tokens = STEPS * settings.accum * settings.micro_batch * settings.seq;
    for rank in &ranks {
        assert_eq!(rank.tokens.iter().sum::<usize>(), tokens, "{name}");
        assert_eq!(rank.counted_bytes, rank.sent_bytes, "{name}");
    }
    together(&ranks)
}

fn plain(size: usize, zero: Zero) -> Settings {
    let (_, model) = models(2).swap_remove(0);
    Settings {
        accum: MICRO_BATCHES / size,
        micro_batch: 1,
        seq: 17,
        ranks: Some(ranks(size, zero)),
        ..with_form(model, forms()[0], "none", DType::F32)
    }
}

/// The last of many ranks has no piece of a block's matrices and owns none of them. It still takes part in the exchanges.
#[test]
fn a_rank_without_a_matrix_makes_its_step() {
    for kind in [OptimizerKind::Muon, OptimizerKind::Adafactor] {
        for states in [Home::Device, Home::Pinned] {
            let settings = Settings {
                accum: 1,
                ranks: Some(ranks(32, Zero::States)),
                homes: Homes {
                    states,
                    window: Window::End,
                    ..Homes::default()
                },
                ..with_optimizer(plain(1, Zero::States), kind)
            };
            let last = of_rank(&settings, 31);
            let architecture = Architecture::of(&last.model, last.attention);
            let layout = last.layout(&architecture).unwrap();
            let own = layout.own_trained(Rank { number: 31, of: 32 });
            let block = &layout.units()[1];
            let has_piece = |entry: &usize| {
                let range = layout.entries()[*entry].range();
                own.within(&range).elements() > 0
            };
            assert!(!block.entries.iter().any(has_piece));
            let planned = plan(&last);
            assert!(planned.ranks.unwrap().sent_bytes > 0, "{kind}");
        }
    }
}

/// Each stage has less than the one before, and more ranks less than fewer.
#[test]
fn ranks_have_their_share() {
    let persistent = |size, zero| plan(&plain(size, zero)).persistent_bytes;
    for size in [2, 4] {
        let stages = Zero::ALL.map(|zero| persistent(size, zero));
        assert!(stages.is_sorted_by(|one, next| one > next), "{stages:?}");
        let fewer = persistent(size / 2, Zero::Weights);
        assert!(stages[3] < fewer, "{stages:?}, {fewer}");
    }
}

/// Added up once a step, the bits are others, and the same at the stages that allow it.
#[test]
fn reducing_once_a_step_sends_less() {
    let at = |size, zero, reduce| {
        let settings = plain(size, zero);
        let ranks = settings.ranks.clone();
        let settings = Settings {
            ranks: ranks.map(|ranks| Ranks { reduce, ..ranks }),
            ..settings
        };
        let sent = plan(&of_rank(&settings, 0)).ranks.unwrap().sent_bytes;
        (run("once a step", &settings), sent)
    };
    let [replicated, states] =
        [Zero::Replicated, Zero::States].map(|zero| at(2, zero, Reduce::Step));
    assert!(replicated.0 == states.0);
    let every = at(2, Zero::States, Reduce::MicroBatch);
    assert!(states.1 < every.1, "{} {}", states.1, every.1);
    assert!(states.0.state != every.0.state);
}

/// Two groups of three, and three groups of two.
#[test]
fn groups_of_any_size_give_the_same_bits() {
    let settings = |size: usize, shard_group| Settings {
        accum: 6 / size,
        ranks: Some(Ranks {
            shard_group,
            ..ranks(size, Zero::Weights)
        }),
        ..plain(1, Zero::Weights)
    };
    let at = |size, shard_group| {
        let settings = settings(size, shard_group);
        together(&each("groups", &settings, STEPS, on_cpu))
    };
    let expected = at(1, None);
    for size in [2, 3] {
        assert!(at(6, Some(size)) == expected, "groups of {size}");
    }
}

/// Groups of ranks with all weights have more of them, and gather units within a group. After an update each rank gets from its copies
/// what they updated of its shard.
#[test]
fn shard_groups_gather_units_among_neighbours() {
    let at = |shard_group| {
        let settings = plain(4, Zero::Weights);
        let ranks = settings.ranks.clone();
        let settings = Settings {
            ranks: ranks.map(|ranks| Ranks {
                shard_group,
                ..ranks
            }),
            ..settings
        };
        let ranks = (0..4).map(|number| plan(&of_rank(&settings, number)));
        let layout = settings.layout(&Architecture::of(&settings.model, settings.attention));
        let planned: Vec<planner::Plan> = ranks.collect();
        (run("shard groups", &settings), planned, layout.unwrap())
    };
    let [(alone, all, layout), (grouped, of_groups, in_groups)] = [at(None), at(Some(2))];
    assert!(alone == grouped);
    let bytes = layout.units().iter();
    let bytes: Vec<u64> = bytes.map(|unit| 4 * unit.cover.elements() as u64).collect();
    let all_bytes: u64 = bytes.iter().sum();
    let more = of_groups[1].persistent_bytes - all[1].persistent_bytes;
    assert_eq!(more, all_bytes / 4);
    // The last block and the head are still there for the backward pass, which needs no embedding.
    let gathered = all_bytes + bytes[1];
    let sent = |plans: &[planner::Plan]| -> u64 {
        let sent = plans.iter();
        sent.map(|plan| plan.ranks.as_ref().unwrap().sent_bytes)
            .sum()
    };
    // Of four ranks each gives three a quarter; of groups of two, each gives one a half, and its copy the quarter that it updated.
    let [far, near, copies] = [3 * gathered, 2 * gathered, all_bytes];
    assert_eq!(sent(&all) - sent(&of_groups), far - near - copies);
    let rank = Rank { number: 1, of: 4 };
    for unit in in_groups.units() {
        let [piece, shard] = [
            in_groups.piece(&unit.cover, rank),
            in_groups.shard(&unit.cover, rank),
        ];
        assert_eq!(
            piece.within_all(&shard),
            piece,
            "a rank keeps what it updates"
        );
        assert_eq!(2 * piece.elements(), shard.elements());
    }
}
