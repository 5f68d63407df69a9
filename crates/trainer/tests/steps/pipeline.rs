//! Pipelines: however many stages and groups of ranks there are, in every schedule, whatever ZeRO divides and in every memory mode,
//! loss, norm, weights and states have the bits of one stage, and every rank's memory and traffic are what was planned for it.

use crate::common::elsewhere::{OPTIMIZERS, forms, with_form, with_optimizer};
use crate::common::experts;
use crate::common::ranks::{Together, each, on_cpu, ranks, together};
use crate::common::{MODES, config, odd_model, variants};
use memory::{DType, Home, Homes, Rank, Window};
use model::{Attention, ModelConfig, OffloadLabels};
use settings::{BaseType, Pipeline, PipelineSchedule, Settings};
use std::ops::Range;
use units::{Ranks, Reduce, Zero};

const STEPS: usize = 2;

/// Blocks of the models.
const LAYERS: usize = 4;

/// Micro-batches of a step, over all ranks.
const MICRO_BATCHES: usize = 8;

/// How a run's ranks divide it: groups of `sharing` ranks to a sequence, in each of some stages.
#[derive(Clone, Debug)]
struct Grid {
    /// The blocks of each virtual stage.
    runs: Vec<Range<usize>>,
    /// Virtual stages of a stage.
    each: usize,
    schedule: PipelineSchedule,
    groups: usize,
    sharing: usize,
    zero: Zero,
}

impl Grid {
    fn one_stage() -> Grid {
        Grid {
            runs: vec![WHOLE],
            each: 1,
            schedule: PipelineSchedule::Gpipe,
            groups: 1,
            sharing: 1,
            zero: Zero::States,
        }
    }

    fn of(runs: &[Range<usize>], schedule: PipelineSchedule, zero: Zero) -> Grid {
        Grid {
            runs: runs.to_vec(),
            schedule,
            zero,
            ..Grid::one_stage()
        }
    }

    /// Two interleaved stages, which have these runs of blocks in turn.
    fn interleaved(runs: &[Range<usize>], zero: Zero) -> Grid {
        Grid {
            each: runs.len() / 2,
            ..Grid::of(runs, PipelineSchedule::Interleaved, zero)
        }
    }
}

fn on_grid(settings: &Settings, grid: &Grid) -> Settings {
    let stage = Rank {
        number: 0,
        of: grid.runs.len() / grid.each,
    };
    Settings {
        accum: MICRO_BATCHES / grid.groups,
        ranks: Some(Ranks {
            stage,
            sharing: grid.sharing,
            ..ranks(grid.groups * grid.sharing, grid.zero)
        }),
        pipeline: (stage.of > 1).then(|| Pipeline {
            schedule: grid.schedule,
            layers: grid.runs.clone(),
            stages: stage.of,
        }),
        ..settings.clone()
    }
}

fn plain(model: ModelConfig, mode: &str) -> Settings {
    let model = ModelConfig {
        tie_embeddings: false,
        router_aux: 0.0,
        router_z_loss: 0.0,
        ..model
    };
    Settings {
        micro_batch: 1,
        seq: 12,
        ..with_form(model, forms()[0], mode, DType::F32)
    }
}

fn run(name: &str, settings: &Settings, grid: &Grid) -> Together {
    let name = format!("{name}, {grid:?}");
    together(&each(&name, &on_grid(settings, grid), STEPS, on_cpu))
}

fn assert_same(name: &str, one: &Together, other: &Together) {
    assert_eq!(one.steps, other.steps, "{name}");
    assert!(one.state == other.state, "{name}");
}

const WHOLE: Range<usize> = 0..LAYERS;
const HALVES: [Range<usize>; 2] = [0..1, 1..LAYERS];
const THIRDS: [Range<usize>; 3] = [0..1, 1..3, 3..LAYERS];
const QUARTERS: [Range<usize>; 4] = [0..1, 1..2, 2..3, 3..LAYERS];

#[test]
fn stages_and_groups_give_the_same_bits_in_every_schedule() {
    use PipelineSchedule::{Gpipe, OneForwardOneBackward, ZbH1};
    let settings = plain(odd_model(LAYERS), "none");
    let one = run("one stage", &settings, &Grid::one_stage());
    let other_data = Settings {
        seq: settings.seq - 1,
        ..settings.clone()
    };
    let other = run("other data", &other_data, &Grid::one_stage());
    assert!(one.steps != other.steps, "steps show what is learnt");
    let grids = [
        (&HALVES[..], OneForwardOneBackward, Zero::Gradients, 1),
        (&HALVES, Gpipe, Zero::Replicated, 1),
        (&THIRDS, OneForwardOneBackward, Zero::States, 1),
        (&QUARTERS, OneForwardOneBackward, Zero::Gradients, 1),
        (&QUARTERS, Gpipe, Zero::States, 1),
        (&HALVES, OneForwardOneBackward, Zero::Replicated, 2),
        (&THIRDS, Gpipe, Zero::States, 2),
        (&QUARTERS, OneForwardOneBackward, Zero::Gradients, 2),
        (&HALVES, OneForwardOneBackward, Zero::Gradients, 4),
        (&THIRDS, ZbH1, Zero::Replicated, 1),
        (&QUARTERS, ZbH1, Zero::Gradients, 1),
        (&THIRDS, ZbH1, Zero::Gradients, 2),
        (&HALVES, ZbH1, Zero::States, 4),
    ];
    for (stages, schedule, zero, groups) in grids {
        let grid = Grid {
            groups,
            ..Grid::of(stages, schedule, zero)
        };
        assert_same(&format!("{grid:?}"), &one, &run("Llama", &settings, &grid));
    }
}

/// Under zb-h1 the last stage keeps what deferred gradients are computed from. The first stage defers none.
#[test]
fn what_deferred_gradients_need_is_planned() {
    use PipelineSchedule::{OneForwardOneBackward, ZbH1};
    let settings = plain(odd_model(LAYERS), "none");
    let peak = |schedule, rank| {
        let grid = Grid::of(&HALVES, schedule, Zero::Gradients);
        let settings = crate::common::ranks::of_rank(&on_grid(&settings, &grid), rank);
        crate::common::plan(&settings).peak_bytes
    };
    assert_eq!(peak(ZbH1, 0), peak(OneForwardOneBackward, 0));
    assert!(peak(ZbH1, 1) > peak(OneForwardOneBackward, 1));
}

/// In other types, with biases, and however ranks add gradients up.
#[test]
fn deferred_gradients_give_the_same_bits() {
    let [(_, bias), ..] = variants(LAYERS);
    let bias = plain(bias, "full");
    let bf16 = Settings {
        micro_batch: 1,
        seq: 12,
        ..with_form(bias.model.clone(), forms()[3], "none", DType::BF16)
    };
    let always = Reduce::MicroBatch;
    let cases = [
        ("biases", &bias, always, Zero::Gradients, true),
        (
            "passes wait for exchanges",
            &bias,
            always,
            Zero::States,
            false,
        ),
        ("bf16", &bf16, always, Zero::Gradients, true),
        ("once a step", &bias, Reduce::Step, Zero::Replicated, true),
        (
            "once a step, states",
            &bias,
            Reduce::Step,
            Zero::States,
            false,
        ),
    ];
    for (name, settings, reduce, zero, overlaps) in cases {
        let of = |stages: &[Range<usize>], schedule| {
            let grid = Grid {
                groups: 2,
                ..Grid::of(stages, schedule, zero)
            };
            let mut settings = on_grid(settings, &grid);
            let ranks = settings.ranks.as_mut().unwrap();
            ranks.reduce = reduce;
            ranks.overlap_grad_reduce = overlaps;
            let name = format!("{name}, {grid:?}");
            together(&each(&name, &settings, STEPS, on_cpu))
        };
        let one = of(&[WHOLE], PipelineSchedule::Gpipe);
        assert_same(name, &one, &of(&THIRDS, PipelineSchedule::ZbH1));
    }
}

#[test]
fn interleaved_stages_give_the_same_bits() {
    let settings = plain(odd_model(LAYERS), "none");
    let one = run("one stage", &settings, &Grid::one_stage());
    for (zero, groups) in [
        (Zero::Gradients, 1),
        (Zero::Replicated, 2),
        (Zero::States, 4),
        (Zero::Gradients, 4),
    ] {
        let grid = Grid {
            groups,
            ..Grid::interleaved(&QUARTERS, zero)
        };
        assert_same(&format!("{grid:?}"), &one, &run("Llama", &settings, &grid));
    }
    let settings = plain(odd_model(8), "full");
    let eighths: Vec<Range<usize>> = (0..8).map(|block| block..block + 1).collect();
    let whole = Grid {
        runs: std::iter::once(0..8).collect(),
        ..Grid::one_stage()
    };
    let one = run("one stage", &settings, &whole);
    for each in [2, 4] {
        let grid = Grid {
            each,
            ..Grid::interleaved(&eighths, Zero::Gradients)
        };
        assert_same(
            &format!("{grid:?}"),
            &one,
            &run("8 blocks", &settings, &grid),
        );
    }
}

#[test]
fn stages_whose_ranks_share_sequences_give_the_same_bits() {
    let settings = plain(odd_model(LAYERS), "none");
    let of = |stages: &[Range<usize>], schedule, groups| Grid {
        groups,
        sharing: 3,
        ..Grid::of(stages, schedule, Zero::Gradients)
    };
    let (usual, later) = (
        PipelineSchedule::OneForwardOneBackward,
        PipelineSchedule::ZbH1,
    );
    let one = run("sharing", &settings, &of(&[WHOLE], usual, 1));
    for grid in [
        of(&HALVES, later, 1),
        of(&THIRDS, usual, 1),
        of(&HALVES, usual, 2),
    ] {
        assert_same(
            &format!("{grid:?}"),
            &one,
            &run("sharing", &settings, &grid),
        );
    }
}

#[test]
fn other_models_give_the_same_bits() {
    let [_, norm, ..] = variants(LAYERS);
    let frozen = |settings: Settings| Settings {
        freeze: Vec::from([
            "*embed_tokens*".into(),
            "*layers.0.*".into(),
            "*layers.1.*".into(),
        ]),
        ..settings
    };
    let cases = [
        ("norms of queries, window", plain(norm.1, "none")),
        ("Qwen2-MoE", plain(experts::qwen(), "none")),
        ("DeepSeek-V3", plain(experts::deepseek(), "none")),
        (
            "the lower half frozen",
            frozen(plain(odd_model(LAYERS), "none")),
        ),
    ];
    for (name, settings) in cases {
        let layers = settings.model.layers;
        let (stages, thirds) = ([0..1, 1..layers], [0..1, 1..2, 2..layers]);
        let whole = Grid {
            runs: std::iter::once(0..layers).collect(),
            ..Grid::one_stage()
        };
        let one = run(name, &settings, &whole);
        for (stages, schedule) in [
            (&stages[..], PipelineSchedule::ZbH1),
            (&thirds, PipelineSchedule::OneForwardOneBackward),
        ]
        .into_iter()
        .filter(|(stages, _)| stages.len() <= layers)
        {
            let grid = Grid::of(stages, schedule, Zero::Gradients);
            assert_same(name, &one, &run(name, &settings, &grid));
        }
    }
}

#[test]
fn memory_modes_give_the_same_bits() {
    for (number, mode) in MODES.into_iter().enumerate() {
        let of = |mode| Settings {
            attention: [Attention::Eager, Attention::Flash][number % 2],
            tile_tokens: [None, Some(4)][number / 5 % 2],
            ..plain(odd_model(LAYERS), mode)
        };
        let one = run(mode, &of("none"), &Grid::one_stage());
        let schedule = [
            PipelineSchedule::OneForwardOneBackward,
            PipelineSchedule::Gpipe,
            PipelineSchedule::ZbH1,
        ][number % 3];
        let interleaved = Grid::interleaved(&QUARTERS, Zero::Gradients);
        for grid in [Grid::of(&THIRDS, schedule, Zero::Gradients), interleaved] {
            assert_same(mode, &one, &run(mode, &of(mode), &grid));
        }
    }
}

#[test]
fn offload_gives_the_same_bits() {
    let settings = Settings {
        attention: Attention::Flash,
        ..plain(odd_model(LAYERS), "none")
    };
    let one = run("all on the device", &settings, &Grid::one_stage());
    let labels = OffloadLabels::parse("qkv,attn_out,block_input").unwrap();
    let away = Settings {
        homes: Homes {
            states: Home::Pinned,
            window: Window::End,
            ..Homes::default()
        },
        policy: settings.policy.clone().offload(&labels).unwrap(),
        ..settings.clone()
    };
    let with = |gradients: &Home| Settings {
        homes: Homes {
            weights: Home::Pinned,
            gradients: gradients.clone(),
            ..away.homes.clone()
        },
        ..away.clone()
    };
    let [weights_too, everything] = [Home::Device, Home::Pinned].map(|home| with(&home));
    let replicated_twice = Grid {
        groups: 2,
        ..Grid::of(&HALVES, PipelineSchedule::Gpipe, Zero::Replicated)
    };
    for grid in [
        Grid::of(
            &THIRDS,
            PipelineSchedule::OneForwardOneBackward,
            Zero::Gradients,
        ),
        Grid::of(&HALVES, PipelineSchedule::Gpipe, Zero::Gradients),
        Grid::of(&THIRDS, PipelineSchedule::ZbH1, Zero::Gradients),
        Grid::interleaved(&QUARTERS, Zero::Gradients),
        Grid {
            zero: Zero::Gradients,
            ..replicated_twice.clone()
        },
        replicated_twice,
    ] {
        let host = |settings: &Settings| {
            let settings = crate::common::ranks::of_rank(&on_grid(settings, &grid), 0);
            crate::common::plan(&settings).host_pinned_bytes
        };
        assert!(host(&away) > host(&settings), "something waits on the host");
        assert!(host(&weights_too) > host(&away), "so do weights");
        let mut ways = vec![&away, &weights_too];
        if grid.zero != Zero::Replicated {
            assert!(host(&everything) > host(&weights_too), "so do gradients");
            ways.push(&everything);
        }
        for settings in ways {
            assert_same("offload", &one, &run("offload", settings, &grid));
        }
    }
}

/// A unit of weights comes in the order in which a pass of a stage uses it, replays included.
#[test]
fn weights_on_the_host_come_for_every_pass() {
    for (number, mode) in MODES.into_iter().enumerate() {
        let settings = plain(odd_model(LAYERS), mode);
        let one = run(mode, &settings, &Grid::one_stage());
        let away = Settings {
            homes: Homes {
                weights: Home::Pinned,
                window: Window::End,
                unit_slots: 1 + number % 2,
                ..Homes::default()
            },
            ..settings
        };
        for grid in [
            Grid::of(&THIRDS, PipelineSchedule::ZbH1, Zero::States),
            Grid {
                groups: 2,
                ..Grid::interleaved(&QUARTERS, Zero::Gradients)
            },
        ] {
            assert_same(mode, &one, &run(mode, &away, &grid));
        }
    }
}

#[test]
fn optimizers_and_formats_of_states_give_the_same_bits() {
    let model = plain(odd_model(LAYERS), "none").model;
    for (number, form) in forms().into_iter().enumerate() {
        let settings = Settings {
            micro_batch: 1,
            seq: 12,
            ..with_form(model.clone(), form, "none", DType::F32)
        };
        let settings = with_optimizer(settings, OPTIMIZERS[number % 3]);
        let one = run("one stage", &settings, &Grid::one_stage());
        for groups in [1, 2] {
            let grid = Grid {
                groups,
                ..Grid::of(
                    &THIRDS,
                    PipelineSchedule::OneForwardOneBackward,
                    Zero::Gradients,
                )
            };
            let name = format!("{form:?}, {groups} groups");
            assert_same(&name, &one, &run(&name, &settings, &grid));
        }
    }
}

#[test]
fn adapters_over_a_frozen_model_give_the_same_bits() {
    let model = plain(odd_model(LAYERS), "none").model;
    for base in [None, Some(BaseType::Nf4)] {
        let mut config = config(model.clone(), DType::F32, "none");
        config.lora.rank = Some(3);
        config.lora.dropout = 0.1;
        config.lora.base_dtype = base;
        let settings = Settings {
            micro_batch: 1,
            seq: 12,
            ..Settings::new(&config).unwrap()
        };
        let one = run("one stage", &settings, &Grid::one_stage());
        let schedule = PipelineSchedule::OneForwardOneBackward;
        for grid in [
            Grid::of(&HALVES, schedule, Zero::Gradients),
            Grid {
                groups: 2,
                ..Grid::of(&THIRDS, schedule, Zero::Gradients)
            },
            Grid::interleaved(&QUARTERS, Zero::Gradients),
        ] {
            assert_same("adapters", &one, &run("adapters", &settings, &grid));
        }
    }
}
