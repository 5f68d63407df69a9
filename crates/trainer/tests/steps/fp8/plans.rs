//! What plans say of products in FP8: bytes of codes on the device, on the host, between ranks and in stages.

use crate::common::elsewhere::all_pinned;
use crate::common::ranks::{of_rank, ranks};
use crate::common::{offloading, plan};
use crate::fp8::runs::{in_fp8, models, products, with};
use memory::{Home, Homes, Window};
use model::{Fp8Products, ModelConfig, NamePatterns, NormPlacement, Stored};
use planner::Plan;
use settings::{Pipeline, PipelineSchedule, Settings};
use std::ops::Range;
use units::{Ranks, Zero};

fn keeping(settings: &Settings, keeps_weights: bool) -> Settings {
    let fp8 = Fp8Products {
        keeps_weights,
        ..products()
    };
    with(settings, fp8)
}

/// Kept as codes, an activation takes half the memory and half the way to the host.
#[test]
fn activations_are_smaller_as_codes() {
    for (name, model) in models(3) {
        let settings = in_fp8(&model, "none");
        let uncoded = Fp8Products {
            saves_codes: false,
            ..products()
        };
        let [coded, wide] = [products(), uncoded].map(|fp8| {
            let here = with(&settings, fp8);
            let away = offloading(&here, "layernorm,mlp_act,attn_out").unwrap();
            (plan(&here).peak_bytes, plan(&away).d2h_bytes)
        });
        assert!(coded.0 < wide.0, "{name}");
        let tokens = (settings.micro_batch * settings.seq * settings.accum) as u64;
        // Those of the last block stay.
        let normed = match model.norm_placement {
            NormPlacement::Before | NormPlacement::Both => 64 + 64,
            NormPlacement::After => 0,
        };
        let codes = tokens * 2 * (normed + 144);
        assert_eq!(wide.1 - coded.1, codes, "{name}");
    }
}

/// Elements of the matrices that are multiplied in FP8.
fn elements_in_blocks(settings: &Settings) -> u64 {
    let architecture = settings.architecture();
    let matrices = architecture.parameters.in_layout();
    let in_blocks = matrices.filter(|one| {
        let is_of_products = one.shape.len() == 2 && one.stored != Stored::Convolution;
        is_of_products && matches!(one.part, memory::Layer::Block(_))
    });
    in_blocks.map(|one| one.elements() as u64).sum()
}

/// The bytes of the arena of codes, on the device or on the host.
fn codes(plan: &Plan) -> Option<u64> {
    let mut arenas = plan.arenas.iter().chain(&plan.host_arenas);
    let arena = arenas.find(|arena| arena.name == "fp8_weights");
    arena.map(|arena| arena.bytes)
}

/// A byte for each element of the matrices.
#[test]
fn codes_of_weights_that_are_kept_take_a_byte() {
    for (name, model) in models(3) {
        let settings = in_fp8(&model, "full");
        let [made, kept] = [false, true].map(|keeps| plan(&keeping(&settings, keeps)));
        assert_eq!(codes(&kept), Some(elements_in_blocks(&settings)), "{name}");
        assert_eq!(codes(&made), None);
        assert!(kept.peak_bytes > made.peak_bytes);
    }
}

/// A unit from the host comes as codes from its second use in a step on, if these are kept.
#[test]
fn units_from_the_host_come_as_codes() {
    let (_, model) = models(4).swap_remove(1);
    let away = |accum, keeps_weights| Settings {
        homes: all_pinned(),
        accum,
        ..keeping(&in_fp8(&model, "full"), keeps_weights)
    };
    let more = |keeps_weights| {
        let [one, two] = [1, 2].map(|accum| plan(&away(accum, keeps_weights)));
        two.h2d_bytes - one.h2d_bytes
    };
    let elements = elements_in_blocks(&away(1, true));
    // A micro-batch more: forward and backward, but the last block's unit stays between.
    assert_eq!(more(false) - more(true), 2 * elements - elements / 4);
    let [kept, used] = [true, false].map(|keeps| plan(&away(3, keeps)));
    assert_eq!(kept.d2h_bytes - used.d2h_bytes, elements);
    assert_eq!(kept.host_pinned_bytes - used.host_pinned_bytes, elements);
}

/// What may live on a rank's host.
fn on_hosts() -> Homes {
    Homes {
        gradients: Home::Device,
        window: Window::End,
        ..all_pinned()
    }
}

/// Attention in bf16 comes first in a block, so the first ranks' shards have fewer codes than the last ones'. Each leases those of its own.
#[test]
fn ranks_lease_the_codes_of_their_own_shards() {
    let (_, model) = models(2).swap_remove(1);
    let fp8 = Fp8Products {
        except: NamePatterns::new(&["*self_attn*".into()]),
        keeps_weights: true,
        ..products()
    };
    for homes in [Homes::default(), on_hosts()] {
        let settings = Settings {
            accum: 2,
            homes,
            ranks: Some(ranks(4, Zero::Weights)),
            ..with(&in_fp8(&model, "none"), fp8.clone())
        };
        let plans = [0, 1, 2, 3].map(|rank| plan(&of_rank(&settings, rank)));
        let own = plans.iter().map(|plan| codes(plan).unwrap_or(0));
        let own: Vec<u64> = own.collect();
        assert!(own[0] < own[3], "{own:?}");
        let architecture = settings.architecture();
        let matrices = architecture.parameters.in_layout();
        let coded = matrices.filter(|one| one.name.contains(".mlp.") && one.shape.len() == 2);
        let coded: usize = coded.map(|one| one.elements()).sum();
        assert_eq!(own.iter().sum::<u64>(), coded as u64, "{own:?}");
        let [first, last] = [&plans[0], &plans[3]];
        let [first, last] =
            [first, last].map(|plan| plan.persistent_bytes + plan.host_pinned_bytes);
        assert_eq!(last - first, own[3] - own[0]);
    }
}

/// Ranks keep codes of their shards, and send these instead of weights, here and from the host.
#[test]
fn ranks_send_codes_that_are_kept() {
    let (_, model) = models(2).swap_remove(0);
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
        (ranks(2, Zero::Weights), on_hosts()),
        (ranks(2, Zero::Gradients), on_hosts()),
        (staying, Homes::default()),
        (in_groups, Homes::default()),
    ] {
        let crossing = |keeps_weights| {
            let settings = Settings {
                homes: homes.clone(),
                accum: 4 / ranks.rank.of,
                ranks: Some(ranks.clone()),
                ..keeping(&in_fp8(&model, "core_attn"), keeps_weights)
            };
            let plan = plan(&of_rank(&settings, 1));
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

#[test]
fn stages_have_codes_and_deferred_gradients_of_their_own() {
    use PipelineSchedule::{OneForwardOneBackward, ZbH1};
    let (_, model) = models(4).swap_remove(1);
    let model = ModelConfig {
        tie_embeddings: false,
        ..model
    };
    let settings = in_fp8(&model, "none");
    // Under zb-h1 the last block, which has no product in FP8, defers its gradients.
    let last = Fp8Products {
        except: NamePatterns::new(&["*.3.*".into()]),
        ..products()
    };
    let (halves, quarters) = ([0..1, 1..4], [0..1, 1..2, 2..3, 3..4]);
    let peak = |schedule| {
        let of = in_stages(&with(&settings, last.clone()), 4, &quarters, schedule);
        plan(&of_rank(&of, 3)).peak_bytes
    };
    assert!(peak(ZbH1) > peak(OneForwardOneBackward));
    // A rank keeps the codes of its own stage's weights. Two groups of ranks come before the next stage.
    let on_two = in_stages(&keeping(&settings, true), 2, &halves, OneForwardOneBackward);
    let [first, second] = [0, 2].map(|rank| codes(&plan(&of_rank(&on_two, rank))).unwrap());
    assert_eq!(second, 3 * first);
}
