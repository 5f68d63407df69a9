//! Several ranks, each on queues that run when a seeded scheduler says: any order that the events allow gives the same bits
//! and none of the waits can be left out.

mod common;

use collectives::Group;
use common::elsewhere::{all_pinned, forms, with_form, with_optimizer};
use common::ranks::{Together, each, on_cpu, ranks, together};
use common::{plan, variants};
use kernels::cpu::Cpu;
use kernels::scheduled::Scheduled;
use memory::{DType, Home, Homes, Memory, Rank, Window};
use model::ModelConfig;
use optim::OptimizerKind;
use session::Session;
use settings::Settings;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use units::{Ranks, Zero};

const STEPS: usize = 3;

/// Schedules of each run: with all waits none is wrong, without those for one reason some is.
const SEEDS: u64 = 25;

const RANKS: usize = 2;

/// What is divided, in what buckets, and what of it lives on the host.
struct Way {
    name: &'static str,
    zero: Zero,
    bucket_bytes: usize,
    accum: usize,
    homes: Homes,
    optimizer: OptimizerKind,
}

fn ways() -> Vec<Way> {
    let here = Homes {
        window: Window::End,
        ..Homes::default()
    };
    let on_host = Homes {
        window: Window::End,
        gradients: Home::Device,
        chunk_bytes: 8_000,
        ..all_pinned()
    };
    let way = |name, zero, bucket_bytes, accum, homes: &Homes| Way {
        name,
        zero,
        bucket_bytes,
        accum,
        homes: homes.clone(),
        optimizer: OptimizerKind::AdamW,
    };
    let states_on_host = Homes {
        weights: Home::Device,
        ..on_host.clone()
    };
    vec![
        way("nothing divided", Zero::Replicated, 8_192, 2, &here),
        way("states", Zero::States, 1 << 20, 1, &here),
        way("gradients", Zero::Gradients, 8_192, 2, &states_on_host),
        way("weights", Zero::Weights, 1 << 20, 2, &here),
        way("weights on the host", Zero::Weights, 8_192, 2, &on_host),
        Way {
            optimizer: OptimizerKind::Muon,
            ..way(
                "whole matrices on the host",
                Zero::Weights,
                8_192,
                1,
                &on_host,
            )
        },
    ]
}

/// Two blocks and few tokens: a schedule in milliseconds.
fn settings(way: &Way) -> Settings {
    let [_, _, (_, model), _] = variants(2);
    let model = ModelConfig {
        ffn: 60,
        vocab: 40,
        ..model
    };
    Settings {
        homes: way.homes.clone(),
        seq: 9,
        accum: way.accum,
        micro_batch: 1,
        ranks: Some(Ranks {
            bucket_bytes: way.bucket_bytes,
            ..ranks(RANKS, way.zero)
        }),
        ..with_optimizer(
            with_form(model, forms()[0], "full:uniform:2", DType::F32),
            way.optimizer,
        )
    }
}

/// What all ranks come to on schedules that begin with a seed, and why their queues waited.
fn on_schedules(
    settings: &Settings,
    seed: u64,
    ignored: Option<&'static str>,
) -> (Together, BTreeMap<&'static str, usize>) {
    let session = |settings: &Settings, group: &Arc<dyn Group>| {
        let memory = Memory::host();
        let cpu = Cpu::in_group(&memory, settings.narrowest_dtype(), group.clone()).unwrap();
        let kernels = Scheduled::new(cpu, seed * 31 + group.rank() as u64, ignored);
        let reasons = kernels.reasons();
        let session = Session::on_kernels(settings.clone(), &memory, Box::new(kernels));
        let mut session = session.unwrap();
        session.initialise(7).unwrap();
        memory.reserve_slab(plan(settings).slab_bytes).unwrap();
        (session, reasons)
    };
    let ranks = each("schedule", settings, STEPS, session);
    let waits = ranks.iter().flat_map(|rank| rank.waits.clone()).collect();
    (together(&ranks), waits)
}

fn expected(settings: &Settings) -> Together {
    let ranks = settings.ranks.clone().map(|ranks| Ranks {
        rank: Rank::ALONE,
        zero: Zero::Replicated,
        ..ranks
    });
    let alone = Settings {
        accum: settings.accum * RANKS,
        homes: Homes::default(),
        ranks,
        ..settings.clone()
    };
    assert!(
        plan(&alone).arenas != plan(settings).arenas,
        "the two sides differ"
    );
    together(&each("alone", &alone, STEPS, on_cpu))
}

#[test]
fn any_schedule_gives_the_same_bits() {
    for way in ways() {
        let settings = settings(&way);
        let expected = expected(&settings);
        for seed in 0..SEEDS {
            let (actual, _) = on_schedules(&settings, seed, None);
            assert_eq!(actual.steps, expected.steps, "{}, seed {seed}", way.name);
            assert!(actual.state == expected.state, "{}, seed {seed}", way.name);
        }
    }
}

/// Whatever waited in some run, for whatever reason: without the waits for it, some schedule of some run is wrong.
#[test]
fn every_wait_is_needed() {
    let mut waiting: BTreeMap<&'static str, Vec<(Settings, Together)>> = BTreeMap::new();
    for way in ways() {
        let settings = settings(&way);
        let expected = expected(&settings);
        let (_, reasons) = on_schedules(&settings, 0, None);
        for reason in reasons.into_keys() {
            let runs = waiting.entry(reason).or_default();
            runs.push((settings.clone(), expected.clone()));
        }
    }
    let mut needless = Vec::new();
    for (reason, runs) in &waiting {
        let is_wrong = |seed: u64| {
            runs.iter().any(|(settings, expected)| {
                let run = || on_schedules(settings, seed, Some(reason)).0;
                let actual = catch_unwind(AssertUnwindSafe(run));
                actual.map_or(true, |actual| actual != *expected)
            })
        };
        if !(0..SEEDS).any(is_wrong) {
            needless.push(reason);
        }
    }
    assert!(needless.is_empty(), "nothing needs: {needless:#?}");
    assert_eq!(waiting.len(), 23, "{:#?}", waiting.keys());
}
