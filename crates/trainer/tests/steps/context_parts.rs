//! Sequences in parts: at equal parts, loss, norm, weights and states have the same bits however many ranks share a sequence, also on one
//! rank that has all parts, however many groups of them there are, whatever ZeRO divides, and in every memory mode. Every rank's memory
//! and traffic are what was planned for it.

use crate::common::elsewhere::{away_from_ranks, forms, with_form};
use crate::common::experts;
use crate::common::ranks::{Together, each, on_cpu, ranks, together};
use crate::common::{odd_model, variants};
use memory::DType;
use model::{Attention, ModelConfig, RouterAuxKind};
use settings::Settings;
use units::{Ranks, Zero};

const STEPS: usize = 2;

/// Micro-batches of a step, over all groups.
const MICRO_BATCHES: usize = 2;

/// Models, each with a number of parts and of ranks that share a sequence.
fn models() -> Vec<(&'static str, ModelConfig, usize, Vec<usize>)> {
    let [_, norm, _, gpt2] = variants(2);
    let deepseek = ModelConfig {
        router_aux_kind: RouterAuxKind::Layer,
        ..experts::deepseek()
    };
    vec![
        ("Llama with q/k norm, window", norm.1, 4, vec![1, 2, 4]),
        ("GPT-2 with dropout", gpt2.1, 4, vec![1, 2, 4]),
        ("Llama", odd_model(2), 3, vec![1, 3]),
        ("Qwen2-MoE", experts::qwen(), 3, vec![1, 3]),
        ("DeepSeek-V3", deepseek, 3, vec![1, 3]),
    ]
}

/// `groups` groups of `sharing` ranks, of which each has some of `parts` parts.
fn in_parts(
    settings: &Settings,
    parts: usize,
    (groups, sharing): (usize, usize),
    zero: Zero,
) -> Settings {
    Settings {
        accum: MICRO_BATCHES / groups,
        ranks: Some(Ranks {
            sharing,
            parts_each: parts / sharing,
            ..ranks(groups * sharing, zero)
        }),
        ..settings.clone()
    }
}

fn plain(model: &ModelConfig, mode: &str) -> Settings {
    Settings {
        micro_batch: 2,
        seq: 24,
        ..with_form(model.clone(), forms()[0], mode, DType::F32)
    }
}

fn run(name: &str, settings: &Settings) -> Together {
    together(&each(name, settings, STEPS, on_cpu))
}

fn assert_same(name: &str, one: &Together, other: &Together) {
    assert_eq!(one.steps, other.steps, "{name}");
    assert!(one.state == other.state, "{name}");
}

#[test]
fn ranks_that_share_a_sequence_do_not_change_its_bits() {
    for (name, model, parts, sizes) in models() {
        let settings = plain(&model, "none");
        let one = run(name, &in_parts(&settings, parts, (1, parts), Zero::States));
        for (number, sharing) in sizes.into_iter().enumerate() {
            for zero in Zero::ALL {
                let groups = [1, 2][(number + usize::from(zero.stage())) % 2];
                let name = format!("{name}, {groups} groups of {sharing}, {zero:?}");
                let other = in_parts(&settings, parts, (groups, sharing), zero);
                assert_same(&name, &one, &run(&name, &other));
            }
        }
    }
}

/// The control: what is compared above would notice another number of parts.
#[test]
fn other_parts_have_other_bits() {
    for (name, model, parts, _) in models() {
        let settings = plain(&model, "none");
        let of = |parts| run(name, &in_parts(&settings, parts, (1, 1), Zero::States));
        let (one, other) = (of(parts), of(if parts == 4 { 2 } else { 1 }));
        assert!(one.state != other.state, "{name}");
    }
}

#[test]
fn memory_modes_give_the_same_bits() {
    let modes = [
        "core_attn",
        "core_attn,layernorm,mlp_act",
        "full",
        "full:uniform:2",
        "attn_out",
    ];
    for (number, mode) in modes.into_iter().enumerate() {
        let (name, model, parts, _) = models().swap_remove(number % 5);
        for attention in [Attention::Eager, Attention::Flash] {
            // Tiles alone replay what is by token.
            let tile_tokens = (number == 1).then_some(5);
            let of = |mode| Settings {
                attention,
                tile_tokens,
                ..plain(&model, mode)
            };
            let name = format!("{name}, {mode}, {attention:?}");
            let one = in_parts(&of("none"), parts, (1, parts), Zero::States);
            let one = each(&name, &one, STEPS, on_cpu);
            let sharing = if parts == 4 { 2 } else { 1 };
            for (sharing, zero) in [(1, Zero::States), (sharing, Zero::Weights)] {
                let other = in_parts(&of(mode), parts, (1, sharing), zero);
                let other = each(&name, &other, STEPS, on_cpu);
                assert_ne!(one[0].replays, other[0].replays, "{name}");
                assert_same(&name, &together(&one), &together(&other));
            }
        }
    }
}

#[test]
fn offload_gives_the_same_bits() {
    let (name, model, parts, _) = models().swap_remove(0);
    let settings = Settings {
        attention: Attention::Flash,
        ..plain(&model, "none")
    };
    let one = run(name, &in_parts(&settings, parts, (1, 4), Zero::States));
    let away = away_from_ranks(settings);
    for zero in [Zero::States, Zero::Gradients, Zero::Weights] {
        for (groups, sharing) in [(1, 1), (2, 2)] {
            let away = in_parts(&away, parts, (groups, sharing), zero);
            assert_same(name, &one, &run(name, &away));
        }
    }
}
