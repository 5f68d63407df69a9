//! Five steps of every family against Hugging Face transformers itself (`tests/golden/transformers/README.md`).

use crate::common::distance::{Distance, distance};
use crate::common::golden::{Golden, reference_steps};
use memory::DType;
use model::Attention;
use serde_json::Value;

#[path = "../golden/transformers/families.rs"]
mod families;
use families::FAMILIES;

/// How far a run may be from transformers.
const TOLERANCE: Distance = Distance {
    loss: 1e-5,
    grad_norm: 1e-5,
    gradient: 1e-4,
    weight: 1e-4,
};

fn open(family: &str) -> Golden {
    Golden::open(&format!("transformers/{family}"))
}

#[test]
fn every_family_agrees_with_transformers() {
    for family in FAMILIES {
        let is_mixture = family.contains("moe")
            || ["mixtral", "deepseek", "gpt_oss", "qwen3_next"]
                .iter()
                .any(|name| family.starts_with(name));
        let ways = [
            (Attention::Eager, "none"),
            (Attention::Eager, "full"),
            (
                Attention::Flash,
                match is_mixture {
                    false => "core_attn,layernorm,mlp",
                    true => "core_attn,layernorm,moe",
                },
            ),
        ];
        for (attention, mode) in ways {
            let distance = distance(&open(family), DType::F32, attention, mode);
            println!("{family} {attention:?} {mode}: {distance:?}");
            let within = distance.loss < TOLERANCE.loss
                && distance.grad_norm < TOLERANCE.grad_norm
                && distance.gradient < TOLERANCE.gradient
                && distance.weight < TOLERANCE.weight;
            assert!(within, "{family} {attention:?} {mode}: {distance:?}");
        }
    }
}

/// How far transformers is from itself when a mistake is made on purpose; of weights nothing is known.
fn distance_of_mistake(golden: &Golden, mistake: &Value) -> Distance {
    let (right, wrong) = (golden.steps(), reference_steps(&mistake["steps"]));
    assert_eq!((right.len(), wrong.len()), (5, 5));
    let mut distance = Distance {
        gradient: mistake["gradient_distance"].as_f64().unwrap(),
        ..Distance::default()
    };
    for (right, wrong) in right.iter().zip(&wrong) {
        let relative = |wrong: f64, right: f64| (wrong - right).abs() / right;
        distance.loss = distance.loss.max(relative(wrong.loss, right.loss));
        let norm = relative(wrong.grad_norm, right.grad_norm);
        distance.grad_norm = distance.grad_norm.max(norm);
    }
    distance
}

/// A loss of balance that leaves out a layer, or that counts padding, shows in gradients, not in the loss of the targets.
#[test]
fn the_tolerances_see_wrong_balance() {
    for (family, mistake) in [
        ("qwen2_moe", "balance_without_a_layer"),
        ("mixtral_padded", "balance_of_padding"),
    ] {
        let golden = open(family);
        let distance = distance_of_mistake(&golden, &golden.reference["broken"][mistake]);
        println!("{mistake}: {distance:?}");
        let beyond =
            distance.gradient > TOLERANCE.gradient && distance.grad_norm > TOLERANCE.grad_norm;
        assert!(beyond, "{mistake}: {distance:?}");
    }
}

/// GPT-2's likeliest mistakes, a GELU by the error function and a square `c_proj` that is not transposed, would not pass, nor a
/// window that is off by one key, nor weights of experts that are normed where they must not be, nor scores and rotations of
/// latent attention as other models have them, nor what makes a family another one than Llama, left out or done in the wrong
/// place.
#[test]
fn the_tolerances_see_likely_mistakes() {
    for (family, mistake) in [
        ("gpt2", "gelu_erf"),
        ("gpt2", "c_proj_untransposed"),
        ("mistral_window", "one_key_more"),
        ("mistral_window", "one_key_less"),
        ("qwen2_moe", "softmax_after_top_k"),
        ("deepseek_v2", "mscale_not_squared"),
        ("deepseek_v3", "rotation_by_halves"),
        ("deepseek_v2_queries", "latents_not_normed"),
        ("deepseek_v3_yarn", "mscale_not_squared"),
        ("smollm3", "every_layer_turned"),
        ("glm4_moe", "whole_heads_turned"),
        ("granite", "embeddings_not_multiplied"),
        ("granite", "residuals_not_multiplied"),
        ("granite", "logits_not_scaled"),
        ("granite", "scores_by_width"),
        ("olmo2", "norms_in_front"),
        ("olmo2", "norms_by_head"),
        ("olmo3", "one_rotation"),
        ("ministral3", "no_temperature"),
        ("phi3_long", "long_factors"),
        ("gemma2", "norms_without_one"),
        ("gemma2", "embeddings_not_scaled"),
        ("gemma2", "scores_not_capped"),
        ("gemma2", "logits_not_capped"),
        ("gemma2", "scores_by_width"),
        ("gemma2", "gelu_erf"),
        ("gemma3", "one_rotation"),
        ("gemma3", "nothing_scaled"),
        ("gpt_oss", "no_sinks"),
        ("gpt_oss", "nothing_clamped"),
        ("gpt_oss", "other_sigmoid"),
        ("gpt_oss", "gate_and_up_swapped"),
        ("gpt_oss", "gate_before_up"),
        ("gpt_oss", "softmax_before_top_k"),
        ("gpt_oss", "ramp_rounded"),
        ("qwen3_next", "flat_split"),
        ("qwen3_next", "norms_without_one"),
        ("qwen3_next", "state_leaks"),
        ("qwen3_next", "weights_not_normed"),
        ("qwen3_5", "state_leaks"),
        ("qwen3_5", "gated_norm_with_one"),
        ("qwen3_5", "whole_heads_turned"),
    ] {
        let golden = open(family);
        let distance = distance_of_mistake(&golden, &golden.reference["broken"][mistake]);
        println!("{mistake}: {distance:?}");
        let beyond = distance.loss > TOLERANCE.loss
            && distance.grad_norm > TOLERANCE.grad_norm
            && distance.gradient > TOLERANCE.gradient;
        assert!(beyond, "{mistake}: {distance:?}");
    }
}
