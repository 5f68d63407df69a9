//! Ranks that share sequences: however many groups of them there are, whatever ZeRO divides, and in every memory mode, loss, norm,
//! weights and states have the same bits, and every rank's memory and traffic are what was planned for it. Without dropout and
//! losses of routers, a run whose ranks share nothing is close by.

use crate::common::elsewhere::{away_from_ranks, forms, with_form};
use crate::common::experts;
use crate::common::ranks::{Together, each, on_cpu, ranks, together};
use crate::common::{MODES, odd_model, variants};
use memory::DType;
use model::{Attention, ModelConfig, RouterAuxKind};
use settings::Settings;
use units::{Ranks, Zero};

const STEPS: usize = 2;

/// Micro-batches of a step, over all ranks.
const MICRO_BATCHES: usize = 4;

/// Models, each with numbers of ranks that may share its sequences: as many as heads of keys, more, and fewer.
fn models() -> Vec<(&'static str, ModelConfig, Vec<usize>)> {
    let [_, norm, _, gpt2] = variants(2);
    let deepseek = ModelConfig {
        router_aux_kind: RouterAuxKind::Layer,
        ..experts::deepseek()
    };
    vec![
        ("Llama", odd_model(2), vec![3]),
        ("q/k norm, window", norm.1, vec![2, 4]),
        ("GPT-2 with dropout", gpt2.1, vec![2, 4]),
        ("Qwen2-MoE", experts::qwen(), vec![3]),
        ("DeepSeek-V3", deepseek, vec![3]),
    ]
}

/// `groups` groups of `sharing` ranks.
fn shared(settings: &Settings, groups: usize, sharing: usize, zero: Zero) -> Settings {
    Settings {
        accum: MICRO_BATCHES / groups,
        ranks: Some(Ranks {
            sharing,
            ..ranks(groups * sharing, zero)
        }),
        ..settings.clone()
    }
}

fn plain(model: ModelConfig, mode: &str) -> Settings {
    Settings {
        micro_batch: 2,
        seq: 24,
        ..with_form(model, forms()[0], mode, DType::F32)
    }
}

fn run(name: &str, settings: &Settings) -> Together {
    together(&each(name, settings, STEPS, on_cpu))
}

fn assert_same(name: &str, one: &Together, other: &Together) {
    assert_eq!(one.steps, other.steps, "{name}");
    assert!(one.state == other.state, "{name}");
}

/// The largest relative distance of losses and of norms.
fn distance(one: &Together, other: &Together) -> f32 {
    let steps = one.steps.iter().zip(&other.steps);
    let far = |one: u32, other: u32| {
        let (one, other) = (f32::from_bits(one), f32::from_bits(other));
        (one / other - 1.0).abs()
    };
    let of_steps = steps.map(|(one, other)| far(one.1, other.1).max(far(one.2, other.2)));
    of_steps.fold(0.0, f32::max)
}

/// A model without what is made for each part by itself: dropout, and the losses of routers.
fn without_parts_of_their_own(model: &ModelConfig) -> ModelConfig {
    ModelConfig {
        dropout: 0.0,
        router_aux: 0.0,
        router_z_loss: 0.0,
        ..model.clone()
    }
}

#[test]
fn ranks_that_share_nothing_are_close_by() {
    for (name, model, sizes) in models() {
        let settings = plain(without_parts_of_their_own(&model), "none");
        let whole = run(name, &shared(&settings, 1, 1, Zero::States));
        for sharing in sizes {
            let one = run(name, &shared(&settings, 1, sharing, Zero::States));
            let far = distance(&one, &whole);
            assert!(far < 1e-5, "{name}, {sharing}: {far}");
            assert!(one.state != whole.state, "{name}: parts are added up apart");
        }
    }
}

#[test]
fn groups_of_ranks_give_the_same_bits() {
    for (name, model, sizes) in models() {
        let settings = plain(model, "none");
        for sharing in sizes {
            let one = run(name, &shared(&settings, 1, sharing, Zero::States));
            for (groups, zero) in Zero::ALL.into_iter().map(|zero| (2, zero)) {
                let name = format!("{name}, {groups} groups of {sharing}, {zero:?}");
                assert_same(
                    &name,
                    &one,
                    &run(&name, &shared(&settings, groups, sharing, zero)),
                );
            }
        }
    }
}

#[test]
fn memory_modes_give_the_same_bits() {
    let modes = MODES.into_iter().enumerate();
    for (number, mode) in modes {
        let (name, model, _) = models().swap_remove([1, 1, 2, 3, 4][number % 5]);
        let sharing = if model.heads == 4 { 2 } else { 3 };
        let attention = [Attention::Eager, Attention::Flash][number % 2];
        // Tiles alone replay what is by token.
        let tile_tokens = mode.starts_with("core_attn,").then_some(5);
        let of = |mode| Settings {
            attention,
            tile_tokens,
            ..plain(model.clone(), mode)
        };
        let name = format!("{name}, {mode}, {attention:?}");
        let one = shared(&of("none"), 1, sharing, Zero::States);
        let one = each(&name, &one, STEPS, on_cpu);
        let other = shared(&of(mode), 1, sharing, Zero::Weights);
        let other = each(&name, &other, STEPS, on_cpu);
        for (one, other) in one.iter().zip(&other) {
            let replays = [one.replays, other.replays];
            assert_eq!(
                replays[0] != replays[1],
                mode != "none",
                "{name}: {replays:?}"
            );
        }
        assert_same(&name, &together(&one), &together(&other));
    }
}

#[test]
fn offload_gives_the_same_bits() {
    let (name, model, _) = models().swap_remove(1);
    let settings = Settings {
        attention: Attention::Flash,
        ..plain(model, "none")
    };
    let one = run(name, &shared(&settings, 1, 2, Zero::States));
    let away = away_from_ranks(settings);
    for zero in [Zero::States, Zero::Gradients, Zero::Weights] {
        assert_same(name, &one, &run(name, &shared(&away, 2, 2, zero)));
    }
}
