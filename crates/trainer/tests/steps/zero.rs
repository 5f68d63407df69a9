//! What ranks divide: whatever that is, in whatever buckets, among however many ranks, loss, norm, weights and states have
//! the bits of one rank that has everything, and every rank's memory and traffic are what was planned for it. What goes
//! together is drawn so that every two choices meet in some run.

use crate::common::covering::{Choices, covering};
use crate::common::elsewhere::{
    OPTIMIZERS, all_pinned, can_update, forms, models, with_form, with_optimizer,
};
use crate::common::frozen;
use crate::common::plan;
use crate::common::ranks::{Together, each, of_rank, on_cpu, ranks, together};
use crate::common::side_by_side::side_by_side;
use memory::{DType, Home, Homes, Rank, Window};
use model::{Architecture, Attention, OffloadLabels};
use optim::OptimizerKind;
use settings::Settings;
use std::collections::BTreeSet;
use std::panic::catch_unwind;
use std::path::Path;
use units::{Ranks, Reduce, Zero};

const STEPS: usize = 3;

/// Micro-batches of a step, over all ranks.
const MICRO_BATCHES: usize = 4;

/// Recompute modes, each with activations that it leaves to be offloaded.
const MODES: [(&str, &str); 4] = [
    ("none", "mlp,attn_out,block_input"),
    ("full", "block_input"),
    ("full:uniform:2", ""),
    ("core_attn", "qkv,mlp"),
];

/// What is chosen for a run.
#[derive(Clone, Copy, Debug)]
enum Factor {
    Zero,
    Ranks,
    Bucket,
    OverlapReduce,
    OverlapGather,
    Reshard,
    States,
    Parameters,
    Mode,
    Activations,
    Attention,
    Tile,
    Form,
    GradientType,
    Model,
    Freeze,
    Optimizer,
    ShardGroup,
    Gradients,
}

/// How many choices there are of each.
const COUNTS: [usize; 19] = [
    4,
    3,
    3,
    2,
    2,
    2,
    3,
    2,
    MODES.len(),
    2,
    2,
    2,
    12,
    2,
    7,
    frozen::CHOICES,
    OPTIMIZERS.len(),
    2,
    2,
];

fn of(choices: &Choices, factor: Factor) -> usize {
    choices[factor as usize]
}

fn go_together(choices: &Choices) -> bool {
    let can_offload = !MODES[of(choices, Factor::Mode)].1.is_empty();
    let is_divided = of(choices, Factor::Zero) == 3;
    let optimizer = OPTIMIZERS[of(choices, Factor::Optimizer)];
    let has_groups = of(choices, Factor::ShardGroup) == 1;
    let can_have_groups =
        is_divided && of(choices, Factor::Ranks) == 2 && of(choices, Factor::Parameters) == 0;
    can_update(optimizer, of(choices, Factor::Freeze))
        && (can_have_groups || !has_groups)
        && (of(choices, Factor::Zero) > 0 || of(choices, Factor::Gradients) == 0)
        && (can_offload || of(choices, Factor::Activations) == 0)
}

/// One rank that has everything.
fn alone(choices: &Choices) -> Settings {
    let (mode, labels) = MODES[of(choices, Factor::Mode)];
    let (_, model) = models(2).swap_remove(of(choices, Factor::Model));
    let gradients = [DType::F32, DType::BF16][of(choices, Factor::GradientType)];
    let settings = with_form(model, forms()[of(choices, Factor::Form)], mode, gradients);
    let settings = with_optimizer(settings, OPTIMIZERS[of(choices, Factor::Optimizer)]);
    let labels = match of(choices, Factor::Activations) {
        0 => OffloadLabels::default(),
        _ => OffloadLabels::parse(labels).unwrap(),
    };
    Settings {
        freeze: frozen::patterns(&settings.model, of(choices, Factor::Freeze)),
        policy: settings.policy.clone().offload(&labels).unwrap(),
        attention: [Attention::Eager, Attention::Flash][of(choices, Factor::Attention)],
        tile_tokens: [None, Some(9)][of(choices, Factor::Tile)],
        accum: MICRO_BATCHES,
        micro_batch: 1,
        seq: 21,
        ranks: Some(ranks(1, Zero::Replicated)),
        ..settings
    }
}

/// Where states may live.
fn state_homes(folder: &Path) -> [Home; 3] {
    [Home::Device, Home::Pinned, Home::Disk(folder.into())]
}

/// Ranks that divide what is chosen.
fn divided(choices: &Choices, folder: &Path) -> Settings {
    let alone = alone(choices);
    let size = [1, 2, 4][of(choices, Factor::Ranks)];
    let is_on = |factor| of(choices, factor) == 0;
    Settings {
        accum: MICRO_BATCHES / size,
        homes: Homes {
            states: state_homes(folder)[of(choices, Factor::States)].clone(),
            weights: [Home::Device, Home::Pinned][of(choices, Factor::Parameters)].clone(),
            gradients: [Home::Device, Home::Pinned][of(choices, Factor::Gradients)].clone(),
            window: Window::End,
            ..all_pinned()
        },
        ranks: Some(Ranks {
            bucket_bytes: [1 << 20, 40_000, 2_000][of(choices, Factor::Bucket)],
            overlap_grad_reduce: is_on(Factor::OverlapReduce),
            overlap_param_gather: is_on(Factor::OverlapGather),
            reshard_after_forward: is_on(Factor::Reshard),
            shard_group: [None, Some(2)][of(choices, Factor::ShardGroup)],
            ..ranks(size, Zero::ALL[of(choices, Factor::Zero)])
        }),
        ..alone
    }
}

fn run(name: &str, settings: &Settings) -> Together {
    let ranks = each(name, settings, STEPS, on_cpu);
    let tokens = STEPS * settings.accum * settings.micro_batch * settings.seq;
    for rank in &ranks {
        assert_eq!(rank.tokens.iter().sum::<usize>(), tokens, "{name}");
        assert_eq!(rank.counted_bytes, rank.sent_bytes, "{name}");
    }
    together(&ranks)
}

fn compare(choices: &Choices) {
    let folder = tempfile::tempdir().unwrap();
    let [alone, divided] = [alone(choices), divided(choices, folder.path())];
    let name = format!("{:?}, {:?}", divided.ranks, divided.homes);
    let expected = run(&name, &alone);
    let actual = run(&name, &divided);
    assert_eq!(actual.steps, expected.steps, "{name}");
    assert!(actual.state == expected.state, "{name}");
}

#[test]
fn whatever_is_divided_changes_nothing_but_memory() {
    let (runs, never) = covering(&COUNTS, 19, go_together);
    let no_labels = [
        (Factor::Mode as usize, 2),
        (Factor::Activations as usize, 1),
    ];
    let nothing_to_make = [
        (Factor::Freeze as usize, 3),
        (Factor::Optimizer as usize, 1),
    ];
    let groups = (Factor::ShardGroup as usize, 1);
    let no_groups = [
        (Factor::Zero, 0),
        (Factor::Zero, 1),
        (Factor::Zero, 2),
        (Factor::Ranks, 0),
        (Factor::Ranks, 1),
        (Factor::Parameters, 1),
    ];
    let all_sums = [(Factor::Zero as usize, 0), (Factor::Gradients as usize, 1)];
    let mut expected = vec![no_labels, nothing_to_make, all_sums];
    expected.extend(no_groups.map(|(factor, choice)| [(factor as usize, choice), groups]));
    assert_eq!(never, BTreeSet::from_iter(expected));
    assert!(
        runs.len() >= 12 * 7,
        "every form of every model: {}",
        runs.len()
    );
    // All of them, so that what the wrong ones have in common shows.
    let compared = side_by_side(&runs, |choices| {
        let compared = catch_unwind(|| compare(choices));
        compared.is_ok() || {
            println!("wrong: {choices:?}");
            false
        }
    });
    let wrong = compared.iter().filter(|is_right| !**is_right).count();
    assert_eq!(wrong, 0, "of {} runs", runs.len());
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

/// Tensors that are updated as a whole, at every stage in every home: Muon's are brought together from the ranks' pieces, of
/// Adafactor's ranks exchange sums.
#[test]
fn whole_tensors_are_the_same_among_any_ranks() {
    let kinds = [
        (OptimizerKind::Muon, ".momentum"),
        (OptimizerKind::Adafactor, ".row_variance"),
    ];
    for (kind, state) in kinds {
        for (number, form) in [0, 4, 9].into_iter().enumerate() {
            let settings = |size, zero, homes| {
                let plain = plain(size, zero);
                let formed = with_form(plain.model.clone(), forms()[form], "none", DType::F32);
                let formed = Settings {
                    dtype: formed.dtype,
                    states: formed.states,
                    homes,
                    ..plain
                };
                with_optimizer(formed, kind)
            };
            let expected = run("alone", &settings(1, Zero::Replicated, Homes::default()));
            let mut names = expected.state.keys();
            assert!(names.any(|name| name.1.contains(state)), "{kind}");
            for (size, zero) in [2, 4]
                .into_iter()
                .flat_map(|size| Zero::ALL.map(|zero| (size, zero)))
            {
                let folder = tempfile::tempdir().unwrap();
                let home = number + size / 2 + usize::from(zero.stage());
                let homes = Homes {
                    states: state_homes(folder.path())[home % 3].clone(),
                    weights: match home % 3 > 0 {
                        true => Home::Pinned,
                        false => Home::Device,
                    },
                    gradients: Home::Device,
                    fraction: [1.0, 0.5][number % 2],
                    window: Window::End,
                    ..all_pinned()
                };
                let mut settings = settings(size, zero, homes);
                if let Some(ranks) = &mut settings.ranks {
                    let is_on_device = zero == Zero::Weights && home % 3 == 0;
                    ranks.shard_group = (size == 4 && is_on_device).then_some(2);
                }
                let name = format!("{kind}, {:?}, {:?}", settings.ranks, settings.homes);
                let actual = run(&name, &settings);
                assert_eq!(actual.steps, expected.steps, "{name}");
                assert!(actual.state == expected.state, "{name}");
            }
        }
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
