//! Ranks that share sequences: without dropout and losses of routers, a run whose ranks share nothing is close by, and each number of
//! parts has bits of its own.

use crate::common::elsewhere::{forms, with_form};
use crate::common::experts;
use crate::common::ranks::{Together, each, on_cpu, ranks, together};
use crate::common::{odd_model, variants};
use memory::DType;
use model::ModelConfig;
use settings::Settings;
use units::{Ranks, Zero};

const STEPS: usize = 2;

/// Models, each with numbers of ranks that may share its sequences: as many as heads of keys, more, and fewer.
fn models() -> Vec<(&'static str, ModelConfig, Vec<usize>)> {
    let [_, norm, _, gpt2, behind, both, _, share, (_, hybrid)] = variants(2);
    vec![
        ("Llama", odd_model(2), vec![3]),
        ("q/k norm, window", norm.1, vec![2, 4]),
        ("GPT-2 with dropout", gpt2.1, vec![2, 4]),
        ("norms behind", behind.1, vec![3]),
        ("norms on both sides, caps", both.1, vec![2, 4]),
        ("a share of heads turned", share.1, vec![3]),
        ("Qwen3.5", hybrid, vec![2, 4]),
        ("Qwen2-MoE", experts::qwen(), vec![3]),
        ("DeepSeek-V3", experts::deepseek(), vec![3]),
        ("gpt-oss", experts::gpt_oss(), vec![3]),
        ("Qwen3-Next", experts::qwen_next(), vec![2, 4]),
    ]
}

fn shared(model: &ModelConfig, sharing: usize) -> Settings {
    Settings {
        micro_batch: 2,
        seq: 24,
        accum: 4,
        ranks: Some(Ranks {
            sharing,
            ..ranks(sharing, Zero::States)
        }),
        ..with_form(model.clone(), forms()[0], "none", DType::F32)
    }
}

fn run(name: &str, settings: &Settings) -> Together {
    together(&each(name, settings, STEPS, on_cpu))
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
        let model = without_parts_of_their_own(&model);
        let whole = run(name, &shared(&model, 1));
        let mut states = vec![&whole.state];
        let parts = sizes
            .iter()
            .map(|sharing| run(name, &shared(&model, *sharing)));
        let parts: Vec<Together> = parts.collect();
        for (one, sharing) in parts.iter().zip(sizes) {
            let far = distance(one, &whole);
            assert!(far < 1e-5, "{name}, {sharing}: {far}");
            assert!(
                !states.contains(&&one.state),
                "{name}: parts are added up apart"
            );
            states.push(&one.state);
        }
    }
}
