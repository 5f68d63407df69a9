//! In FP8, what lives elsewhere and who computes it change no bit: host memory, ranks, parts of sequences, stages of a pipeline.

use crate::common::elsewhere::{self, all_pinned};
use crate::common::ranks::{each, of_rank, on_cpu, ranks, together};
use crate::common::side_by_side::side_by_side;
use crate::common::{offloading, on_schedule, plan};
use crate::fp8::runs::{STEPS, assert_same, in_fp8, models, products, run, with};
use memory::{Home, Homes, Window};
use model::{Attention, Fp8Products, ModelConfig, NamePatterns};
use planner::Plan;
use settings::{Pipeline, PipelineSchedule, Settings};
use std::ops::Range;
use units::{Ranks, Zero};

/// Kept as codes, an activation takes half the way to the host.
#[test]
fn activations_on_the_host_change_no_bit() {
    side_by_side(models(3), |(name, model)| {
        let settings = in_fp8(&model, "none");
        let labels = "layernorm,mlp_act,attn_out";
        let away = offloading(&settings, labels).unwrap();
        let uncoded = Fp8Products {
            saves_codes: false,
            ..products()
        };
        let (expected, resident) = run(name, &settings);
        let (bits, planned) = run(name, &away);
        let (wide_bits, wide) = run(name, &with(&away, uncoded));
        assert_same(&bits, &expected, name);
        assert_same(&wide_bits, &expected, name);
        // In any order that the waits between queues allow.
        for seed in 0..2 {
            let (mut session, _) = on_schedule(&away, seed, None);
            let bits = elsewhere::run(&mut session, &away, 0..STEPS, |_| {});
            assert_same(&bits, &expected, &format!("{name}, schedule {seed}"));
        }
        // Loss and norm are read in all of them.
        assert!(planned.d2h_bytes > resident.d2h_bytes);
        let tokens = (settings.micro_batch * settings.seq * settings.accum) as u64;
        // Those of the last block stay.
        let codes = tokens * 2 * (64 + 64 + 144);
        assert_eq!(wide.d2h_bytes - planned.d2h_bytes, codes, "{name}");
    });
}

#[test]
fn weights_gradients_and_states_elsewhere_change_no_bit() {
    side_by_side(models(3), |(name, model)| {
        let settings = in_fp8(&model, "mlp");
        let (expected, resident) = run(name, &settings);
        let away = Settings {
            homes: all_pinned(),
            ..settings
        };
        let (bits, planned) = run(name, &away);
        assert_same(&bits, &expected, name);
        assert!(planned.peak_bytes < resident.peak_bytes && planned.h2d_bytes > 0);
    });
}

/// Elements of the matrices that are multiplied in FP8.
fn elements_in_blocks(settings: &Settings) -> u64 {
    let architecture = settings.architecture();
    let matrices = architecture.parameters.in_layout();
    let in_blocks =
        matrices.filter(|one| one.shape.len() == 2 && matches!(one.part, memory::Layer::Block(_)));
    in_blocks.map(|one| one.elements() as u64).sum()
}

/// Made once a step instead of at each use, from the same weights: a byte for each element of the matrices.
#[test]
fn codes_of_weights_that_are_kept_change_no_bit() {
    side_by_side(models(3), |(name, model)| {
        let settings = Settings {
            accum: 3,
            ..in_fp8(&model, "full")
        };
        let kept = Fp8Products {
            keeps_weights: true,
            ..products()
        };
        let (expected, made) = run(name, &settings);
        let (bits, planned) = run(name, &with(&settings, kept.clone()));
        assert_same(&bits, &expected, name);
        let arena = |plan: &Plan| {
            let mut arenas = plan.arenas.iter();
            let arena = arenas.find(|arena| arena.name == "fp8_weights");
            arena.map(|arena| arena.bytes)
        };
        let elements = elements_in_blocks(&settings);
        assert_eq!(arena(&planned), Some(elements), "{name}");
        assert_eq!(arena(&made), None);
        assert!(planned.peak_bytes > made.peak_bytes);
    });
}

/// A unit from the host comes as codes from its second use in a step on, if these are kept.
#[test]
fn units_from_the_host_come_as_codes() {
    let (name, model) = models(4).swap_remove(1);
    let away = |accum, keeps_weights| Settings {
        homes: all_pinned(),
        accum,
        ..with(
            &in_fp8(&model, "full"),
            Fp8Products {
                keeps_weights,
                ..products()
            },
        )
    };
    let more = |keeps_weights| {
        let [(_, one), (_, two)] = [1, 2].map(|accum| run(name, &away(accum, keeps_weights)));
        two.h2d_bytes - one.h2d_bytes
    };
    let elements = elements_in_blocks(&away(1, true));
    // A micro-batch more: forward and backward, but the last block's unit stays between.
    assert_eq!(more(false) - more(true), 2 * elements - elements / 4);
    let [(bits, kept), (expected, used)] = [true, false].map(|keeps| run(name, &away(3, keeps)));
    assert_same(&bits, &expected, name);
    assert_eq!(kept.d2h_bytes - used.d2h_bytes, elements);
    let host = |plan: &Plan| plan.host_pinned_bytes;
    assert_eq!(host(&kept) - host(&used), elements);
}

/// Codes of weights on the device stay while the backward pass updates the weights; weights on the host come as they are stored.
#[test]
fn gradients_that_are_released_change_no_bit() {
    let (name, model) = models(3).swap_remove(1);
    let of = |weights: Home, keeps_weights| {
        let kept = Fp8Products {
            keeps_weights,
            ..products()
        };
        let mut settings = Settings {
            accum: 1,
            homes: Homes {
                weights,
                gradients: Home::Released,
                ..Homes::default()
            },
            ..with(&in_fp8(&model, "full"), kept)
        };
        settings.optimizer.clip_norm = f64::INFINITY;
        settings
    };
    let (expected, _) = run(name, &of(Home::Device, false));
    for (home, keeps_weights) in [(Home::Device, true), (Home::Pinned, false)] {
        let (bits, _) = run(name, &of(home, keeps_weights));
        assert_same(&bits, &expected, name);
    }
}

/// Attention in bf16 comes first in a block, so the first ranks' shards have fewer codes than the last ones'; all need the same memory.
#[test]
fn ranks_need_the_same_memory_for_codes() {
    let (name, model) = models(2).swap_remove(1);
    let fp8 = Fp8Products {
        except: NamePatterns::new(&["*self_attn*".into()]),
        keeps_weights: true,
        ..products()
    };
    for homes in [
        Homes::default(),
        Homes {
            gradients: Home::Device,
            window: Window::End,
            ..all_pinned()
        },
    ] {
        let settings = Settings {
            accum: 2,
            homes,
            ranks: Some(ranks(4, Zero::Weights)),
            ..with(&in_fp8(&model, "none"), fp8.clone())
        };
        each(name, &settings, 1, on_cpu);
        let needed = |rank| {
            let plan = plan(&of_rank(&settings, rank));
            (plan.peak_bytes, plan.host_pinned_bytes)
        };
        assert_eq!(needed(0), needed(3));
    }
}

/// The same micro-batches on one rank, two or four, whatever these divide.
#[test]
fn ranks_have_the_bits_of_one() {
    let (name, model) = models(2).swap_remove(0);
    let of = |size: usize, zero| Settings {
        accum: 4 / size,
        ranks: Some(ranks(size, zero)),
        ..in_fp8(&model, "core_attn")
    };
    let together = |settings: &Settings| together(&each(name, settings, STEPS, on_cpu));
    let alone = together(&of(1, Zero::Replicated));
    for zero in Zero::ALL {
        for size in [2, 4] {
            let settings = of(size, zero);
            assert!(together(&settings) == alone, "{size} ranks, {zero:?}");
            let peaks =
                [&of(1, Zero::Replicated), &of_rank(&settings, 1)].map(|of| plan(of).peak_bytes);
            assert!(zero == Zero::Replicated || peaks[1] < peaks[0]);
        }
    }
    let bf16 = Settings {
        fp8: None,
        ..of(1, Zero::Replicated)
    };
    assert!(together(&bf16).steps != alone.steps);
    // Ranks keep codes of their shards, and send these instead of weights, here and from the host.
    let on_hosts = Homes {
        gradients: Home::Device,
        window: Window::End,
        ..all_pinned()
    };
    let staying = Ranks {
        reshard_after_forward: false,
        ..ranks(2, Zero::Weights)
    };
    let in_groups = Ranks {
        shard_group: Some(2),
        ..ranks(4, Zero::Weights)
    };
    for (ranks, homes) in [
        (ranks(2, Zero::Weights), Homes::default()),
        (ranks(2, Zero::Weights), on_hosts.clone()),
        (ranks(2, Zero::Gradients), on_hosts),
        (staying, Homes::default()),
        (in_groups, Homes::default()),
    ] {
        let of = |keeps_weights| Settings {
            homes: homes.clone(),
            accum: 4 / ranks.rank.of,
            ranks: Some(ranks.clone()),
            ..with(
                &of(1, Zero::Replicated),
                Fp8Products {
                    keeps_weights,
                    ..products()
                },
            )
        };
        assert!(together(&of(true)) == alone, "{ranks:?}, {homes:?}");
        let crossing = |keeps_weights| {
            let plan = plan(&of_rank(&of(keeps_weights), 1));
            [plan.ranks.as_ref().unwrap().sent_bytes, plan.h2d_bytes]
        };
        let (used, kept) = (crossing(false), crossing(true));
        let on_host = homes.weights == Home::Pinned;
        for (less, used, kept) in [
            (ranks.zero == Zero::Weights, used[0], kept[0]),
            (on_host, used[1], kept[1]),
        ] {
            assert_eq!(kept < used, less, "{ranks:?}, {homes:?}");
            assert!(less || kept == used, "{ranks:?}, {homes:?}");
        }
    }
}

/// A part of a sequence has scales of its own, as a micro-batch has: one group of ranks that share, two, or one rank that has both
/// parts.
#[test]
fn parts_of_sequences_have_the_same_bits_on_any_number_of_ranks() {
    let (name, model) = models(2).swap_remove(1);
    let of = |groups: usize, parts_each: usize, mode| {
        let sharing = 2 / parts_each;
        Settings {
            micro_batch: 2,
            seq: 24,
            accum: 4 / groups,
            attention: Attention::Flash,
            ranks: Some(Ranks {
                sharing,
                parts_each,
                ..ranks(sharing * groups, Zero::States)
            }),
            ..in_fp8(&model, mode)
        }
    };
    let run = |settings: &Settings| together(&each(name, settings, STEPS, on_cpu));
    let one = run(&of(1, 1, "none"));
    for (groups, parts_each, mode) in [
        (2, 1, "none"),
        (2, 1, "full"),
        (1, 2, "none"),
        (2, 2, "core_attn"),
        (1, 2, "full"),
    ] {
        let other = run(&of(groups, parts_each, mode));
        assert!(
            other == one,
            "{groups} groups, {parts_each} parts each, {mode}"
        );
    }
}

/// A step of eight micro-batches on four ranks.
fn in_stages(
    settings: &Settings,
    stages: usize,
    runs: &[Range<usize>],
    schedule: PipelineSchedule,
) -> Settings {
    let groups = 4 / stages;
    let stage = memory::Rank {
        number: 0,
        of: stages,
    };
    Settings {
        accum: 8 / groups,
        ranks: Some(Ranks {
            stage,
            ..ranks(groups, Zero::Gradients)
        }),
        pipeline: Some(Pipeline {
            schedule,
            layers: runs.to_vec(),
            stages,
        }),
        ..settings.clone()
    }
}

/// A stage has several micro-batches under way, and each has scales of its own.
#[test]
fn pipelines_have_the_bits_of_one_stage() {
    use PipelineSchedule::{Gpipe, Interleaved, OneForwardOneBackward, ZbH1};
    let (name, model) = models(4).swap_remove(1);
    let model = ModelConfig {
        tie_embeddings: false,
        ..model
    };
    let settings = |mode, saves_codes, keeps_weights| {
        let fp8 = Fp8Products {
            saves_codes,
            keeps_weights,
            ..products()
        };
        with(&in_fp8(&model, mode), fp8)
    };
    let run = |settings: &Settings| together(&each(name, settings, STEPS, on_cpu));
    let one = run(&Settings {
        accum: 8,
        ranks: Some(ranks(1, Zero::Gradients)),
        ..settings("none", true, false)
    });
    let (halves, quarters) = ([0..1, 1..4], [0..1, 1..2, 2..3, 3..4]);
    let on_two = |of: &Settings| in_stages(of, 2, &halves, OneForwardOneBackward);
    let on_four = |of: &Settings| in_stages(of, 4, &quarters, Gpipe);
    let interleaved = |of: &Settings| in_stages(of, 2, &quarters, Interleaved);
    for other in [
        on_two(&settings("none", true, false)),
        on_two(&settings("mlp", false, true)),
        on_four(&settings("full", true, true)),
        interleaved(&settings("none", true, true)),
        interleaved(&settings("core_attn,layernorm", true, false)),
    ] {
        assert!(run(&other) == one, "{:?}, {:?}", other.pipeline, other.fp8);
    }
    // One stage has no product in FP8.
    let without = |pattern: &str| {
        let fp8 = Fp8Products {
            except: NamePatterns::new(&[pattern.into()]),
            ..products()
        };
        with(&settings("none", true, false), fp8)
    };
    let some = without("*.0.*");
    let expected = run(&Settings {
        accum: 8,
        ranks: Some(ranks(1, Zero::Gradients)),
        ..some.clone()
    });
    assert!(run(&on_two(&some)) == expected && expected != one);
    // Under zb-h1 the last block, which has no product in FP8, defers its gradients.
    let last = without("*.3.*");
    let [deferring, at_once] =
        [ZbH1, OneForwardOneBackward].map(|schedule| in_stages(&last, 4, &quarters, schedule));
    let peak = |of| plan(&of_rank(of, 3)).peak_bytes;
    assert!(peak(&deferring) > peak(&at_once));
    assert!(run(&deferring) == run(&at_once));
    // A rank keeps the codes of its own stage's weights.
    let codes = |rank| {
        let own = plan(&of_rank(&on_two(&settings("none", true, true)), rank));
        let mut arenas = own.arenas.iter();
        arenas
            .find(|arena| arena.name == "fp8_weights")
            .map(|arena| arena.bytes)
    };
    let first = codes(0).unwrap();
    // Two groups of ranks come before the next stage.
    assert_eq!(codes(2), Some(3 * first));
}
