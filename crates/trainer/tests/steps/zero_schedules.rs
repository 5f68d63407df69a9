//! Several ranks, each on queues that run when a seeded scheduler says: any order that the events allow gives the same bits
//! and none of the waits can be left out.

use crate::common::elsewhere::{all_pinned, forms, with_form, with_optimizer};
use crate::common::ranks::{OfRank, Together, each, on_cpu, ranks, together};
use crate::common::{plan, variants};
use collectives::Group;
use fakes::scheduled::Scheduled;
use kernels::cpu::Cpu;
use kernels::fp8::Fp8;
use memory::{DType, Home, Homes, Memory, Rank, Window};
use model::{Fp8Products, ModelConfig, NamePatterns};
use optim::OptimizerKind;
use session::Session;
use settings::{Pipeline, PipelineSchedule, Settings};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use units::{Ranks, Zero};

const STEPS: usize = 3;

/// Schedules of each run.
const SEEDS: u64 = 6;

const RANKS: usize = 2;

/// What is divided, in what buckets, and what of it lives on the host.
struct Way {
    name: &'static str,
    zero: Zero,
    bucket_bytes: usize,
    accum: usize,
    homes: Homes,
    optimizer: OptimizerKind,
    /// Ranks that share each sequence.
    sharing: usize,
    /// Whether there are two groups of ranks, each of which has all weights.
    has_shard_groups: bool,
    /// Whether products are in FP8, and codes of weights are kept for a step then.
    fp8_keeping: Option<bool>,
    /// If ranks are the stages of a pipeline: in which order they work, and how many blocks each has, in runs of one.
    stages: Option<(PipelineSchedule, usize)>,
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
        sharing: 1,
        has_shard_groups: false,
        fp8_keeping: None,
        stages: None,
    };
    let states_on_host = Homes {
        weights: Home::Device,
        ..on_host.clone()
    };
    let all_on_host = Homes {
        gradients: Home::Pinned,
        ..on_host.clone()
    };
    let gradients_on_host = Homes {
        weights: Home::Device,
        ..all_on_host.clone()
    };
    vec![
        way("nothing divided", Zero::Replicated, 8_192, 2, &here),
        way("states", Zero::States, 1 << 20, 1, &here),
        way("gradients", Zero::Gradients, 8_192, 2, &states_on_host),
        way("weights", Zero::Weights, 1 << 20, 2, &here),
        way("weights on the host", Zero::Weights, 8_192, 2, &on_host),
        way(
            "all weights on every host",
            Zero::States,
            8_192,
            1,
            &on_host,
        ),
        Way {
            has_shard_groups: true,
            ..way("shard groups", Zero::Weights, 8_192, 1, &states_on_host)
        },
        Way {
            sharing: RANKS,
            ..way("sequences", Zero::Weights, 8_192, 2, &here)
        },
        Way {
            fp8_keeping: Some(false),
            ..way("FP8", Zero::States, 8_192, 1, &here)
        },
        Way {
            fp8_keeping: Some(true),
            ..way("codes of shards", Zero::Weights, 8_192, 2, &here)
        },
        Way {
            fp8_keeping: Some(true),
            ..way("codes on the host", Zero::Weights, 8_192, 2, &on_host)
        },
        Way {
            // Under 1F1B, what two stages send has always left before something comes, for which a pass waits anyway.
            stages: Some((PipelineSchedule::Gpipe, 1)),
            ..way("stages", Zero::Gradients, 8_192, 4, &states_on_host)
        },
        Way {
            stages: Some((PipelineSchedule::Interleaved, 2)),
            ..way("runs of blocks", Zero::Gradients, 8_192, 4, &states_on_host)
        },
        Way {
            stages: Some((PipelineSchedule::ZbH1, 1)),
            ..way("deferred gradients", Zero::Gradients, 8_192, 4, &here)
        },
        Way {
            stages: Some((PipelineSchedule::OneForwardOneBackward, 1)),
            ..way("stages on the host", Zero::States, 8_192, 4, &all_on_host)
        },
        way(
            "gradients on the host",
            Zero::Gradients,
            8_192,
            2,
            &gradients_on_host,
        ),
        Way {
            optimizer: OptimizerKind::Muon,
            ..way(
                "whole matrices on every host",
                Zero::Gradients,
                8_192,
                1,
                &all_on_host,
            )
        },
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

/// Few blocks and tokens: a schedule in milliseconds.
fn settings(way: &Way) -> Settings {
    let blocks = way.stages.map_or(2, |(_, each)| each * RANKS);
    let [_, _, (_, model), _] = variants(blocks);
    let model = ModelConfig {
        ffn: 60,
        vocab: 40,
        heads: 2,
        tie_embeddings: model.tie_embeddings && way.stages.is_none(),
        ..model
    };
    let (model, form, dtype) = match way.fp8_keeping.is_some() {
        false => (model, forms()[0], DType::F32),
        true => {
            let whole = ModelConfig {
                hidden: 32,
                head_dim: 16,
                ffn: 64,
                ..model
            };
            (whole, forms()[3], DType::BF16)
        }
    };
    let (in_stage, stage) = match way.stages {
        None if way.has_shard_groups => (2 * RANKS, Rank::ALONE),
        None => (RANKS, Rank::ALONE),
        Some(_) => (
            1,
            Rank {
                number: 0,
                of: RANKS,
            },
        ),
    };
    let pipeline = way.stages.map(|(schedule, _)| Pipeline {
        schedule,
        layers: (0..blocks).map(|block| block..block + 1).collect(),
        stages: RANKS,
    });
    Settings {
        homes: way.homes.clone(),
        seq: 10,
        accum: way.accum,
        micro_batch: 1,
        ranks: Some(Ranks {
            bucket_bytes: way.bucket_bytes,
            sharing: way.sharing,
            shard_group: way.has_shard_groups.then_some(RANKS),
            stage,
            ..ranks(in_stage, way.zero)
        }),
        pipeline,
        fp8: way.fp8_keeping.map(|keeps_weights| Fp8Products {
            gradients: Fp8::E5m2,
            except: NamePatterns::default(),
            saves_codes: true,
            keeps_weights,
            fast_accumulation: false,
        }),
        ..with_optimizer(
            with_form(model, form, "full:uniform:2", dtype),
            way.optimizer,
        )
    }
}

/// The outcome of all ranks on schedules that begin with a seed.
fn on_schedules(settings: &Settings, seed: u64, ignored: Option<&'static str>) -> Vec<OfRank> {
    let session = |settings: &Settings, group: &Arc<dyn Group>| {
        let memory = Memory::host();
        let cpu = Cpu::in_group(&memory, settings.narrowest_dtype(), group.clone()).unwrap();
        let kernels = Scheduled::new(cpu, seed * 31 + group.rank() as u64, ignored);
        let waits = kernels.backend().waits();
        let session = Session::on_kernels(settings.clone(), &memory, Box::new(kernels));
        let mut session = session.unwrap();
        session.initialise(7).unwrap();
        memory.reserve_slab(plan(settings).slab_bytes).unwrap();
        (session, waits)
    };
    each("schedule", settings, STEPS, session)
}

fn unordered(ranks: &[OfRank]) -> BTreeSet<String> {
    let unordered = ranks.iter().flat_map(|rank| rank.unordered.clone());
    unordered.collect()
}

/// The result of one rank; where ranks share sequences, of the same ranks, with their queues run in order.
fn expected(settings: &Settings) -> Together {
    if settings.own_parts() != memory::OwnParts::WHOLE {
        return together(&each("in order", settings, STEPS, on_cpu));
    }
    let ranks = settings.ranks.clone().map(|ranks| Ranks {
        rank: Rank::ALONE,
        stage: Rank::ALONE,
        zero: Zero::Replicated,
        shard_group: None,
        ..ranks
    });
    let alone = Settings {
        accum: settings.accum * settings.rank().of,
        pipeline: None,
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
            let ranks = on_schedules(&settings, seed, None);
            assert_eq!(unordered(&ranks), BTreeSet::new(), "{}", way.name);
            let actual = together(&ranks);
            assert_eq!(actual.steps, expected.steps, "{}, seed {seed}", way.name);
            assert!(actual == expected, "{}, seed {seed}", way.name);
        }
    }
}

/// Whatever waited in some run, for whatever reason: without the waits for it, work of some run that touches the same
/// bytes is unordered, or some schedule gives other bits (operations do not declare that they read single numbers).
#[test]
fn every_wait_is_needed() {
    let mut waiting: BTreeMap<&'static str, Vec<Settings>> = BTreeMap::new();
    for way in ways() {
        let settings = settings(&way);
        let ranks = on_schedules(&settings, 0, None);
        let reasons = ranks.iter().flat_map(|rank| rank.waits.keys());
        for reason in reasons.collect::<BTreeSet<_>>() {
            waiting.entry(reason).or_default().push(settings.clone());
        }
    }
    let is_needed = |reason: &'static str| {
        let is_wrong = |settings: &Settings, seed: u64| {
            let run = || on_schedules(settings, seed, Some(reason));
            // Wrong numbers may end a rank.
            let ranks = catch_unwind(AssertUnwindSafe(run));
            ranks.map_or(true, |ranks| {
                !unordered(&ranks).is_empty() || together(&ranks) != expected(settings)
            })
        };
        let mut schedules =
            (0..25).flat_map(|seed| waiting[reason].iter().map(move |it| (it, seed)));
        schedules.any(|(settings, seed)| is_wrong(settings, seed))
    };
    let needless: Vec<_> = waiting.keys().filter(|reason| !is_needed(reason)).collect();
    assert!(needless.is_empty(), "nothing needs: {needless:#?}");
    assert_eq!(waiting.len(), 37, "{:#?}", waiting.keys());
}
