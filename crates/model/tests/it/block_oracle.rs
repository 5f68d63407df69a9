//! A whole model, embedding to loss, forward and backward, against candle's autograd in f64.

use crate::common::harness::noise;
use crate::common::oracle::{Oracle, Vars, gradients, var};
use candle_core::Tensor;
use kernels::cpu::Cpu;
use memory::{Category, DType, Home, Homes, Memory};
use model::{
    ActivationFunction, Architecture, Attention, Batch, BatchShape, Computation, DeltaConfig,
    ExpertsConfig, HeadLoss, LatentConfig, LossPart, Model, ModelConfig, NormPlacement, Policy,
    Purpose, QkNormExtent, RopeScaling, RouterAuxKind, ScoreKind, StepLoss, Training, Work,
};
use std::collections::BTreeMap;
use std::rc::Rc;
use units::{Gradients, Weights};

const ROWS: usize = 2;
const SEQ: usize = 37;
const VOCAB: usize = 131;

/// More than a chunk of the gated delta rule.
const LONG: usize = 70;

/// Relative to a tensor's largest entry.
const TOLERANCE: f64 = 2e-5;

fn plain() -> ModelConfig {
    ModelConfig {
        hidden: 44,
        layers: 2,
        heads: 3,
        kv_heads: 1,
        head_dim: 20,
        ffn: 67,
        vocab: VOCAB,
        ..ModelConfig::PLAIN
    }
}

/// Values that leave no term of any gradient small: norm weights far from 1, biases far from 0.
fn values(seed: u64, name: &str, elements: usize) -> Vec<f32> {
    let value = |index: usize| {
        let noise = noise(seed, index as u64);
        match name {
            name if name.ends_with("norm.weight") => 1.0 + 0.5 * noise,
            name if name.ends_with("bias") => 0.5 * noise,
            _ => 0.25 * noise,
        }
    };
    (0..elements).map(value).collect()
}

/// Ids and targets of a micro-batch; every seventh target is masked.
fn batch(seed: u64, seq: usize) -> (Vec<i32>, Vec<i32>) {
    let token = |seed: u64, index: usize| {
        let unit = (noise(seed, index as u64) + 1.0) / 2.0;
        ((unit * VOCAB as f32) as i32).min(VOCAB as i32 - 1)
    };
    let ids = (0..ROWS * seq).map(|index| token(seed, index)).collect();
    let target = |index: usize| {
        if index % 7 == 3 {
            -100
        } else {
            token(seed + 1, index)
        }
    };
    (ids, (0..ROWS * seq).map(target).collect())
}

/// Compares the model, with either kind of attention, to the oracle.
fn assert_agrees(name: &str, config: &ModelConfig) {
    for attention in [Attention::Eager, Attention::Flash] {
        let name = format!("{name}, {attention:?}");
        assert_agrees_with(&name, config, attention, (SEQ, None));
    }
}

/// Runs two micro-batches of sequences of so many tokens through the model and the oracle, and compares the loss and every gradient. With lengths, the
/// rest of each sequence is padding.
fn assert_agrees_with(
    name: &str,
    config: &ModelConfig,
    attention: Attention,
    (seq, lengths): (usize, Option<[[i32; ROWS]; 2]>),
) {
    let shape = BatchShape { rows: ROWS, seq };
    let memory = Memory::host();
    let cpu = Cpu::new(&memory, DType::F32).unwrap();
    let architecture = Architecture::of(config, attention);
    let layout = Rc::new(architecture.parameters.layout(|_, _| false));
    let computation = Computation {
        dtype: DType::F32,
        seq,
        head_chunk: 29,
    };
    let model = Model::new(architecture, layout.clone(), &memory, &cpu, computation).unwrap();
    let layout = &layout;
    let mut weights = Weights::lease(&memory, layout, DType::F32, &Homes::default(), None).unwrap();
    let mut vars = Vars::new();
    for (index, entry) in layout.entries().iter().enumerate() {
        let values = values(index as u64 + 1, &entry.name, entry.elements());
        let bytes = bytemuck::cast_slice(&values);
        weights.store(&cpu, entry.range(), bytes).unwrap();
        vars.insert(entry.name.clone(), var(&values, &entry.shape).unwrap());
    }

    let home = Home::Device;
    let mut summed = Gradients::lease(&memory, layout, DType::F32, &home, None).unwrap();
    summed.begin_step();
    let parts = config.router_losses().map_or(1, |_| LossPart::WITH_ROUTERS);
    let loss = memory.lease_persistent(Category::OptimizerState, "loss", [parts], DType::F32);
    let (mut loss, mut replayed) = (loss.unwrap(), model.no_replays());
    let scale = 1.0 / 64.0f32;
    let lease = memory.lease_persistent(Category::OptimizerState, "scale", [1], DType::F32);
    let mut on_device_scale = lease.unwrap();
    cpu.upload(on_device_scale.view_mut(), bytemuck::bytes_of(&scale))
        .unwrap();
    let mut expected_loss: Option<Tensor> = None;
    let mut of_routers =
        Tensor::zeros((), candle_core::DType::F64, &candle_core::Device::Cpu).unwrap();
    for micro in 0..2 {
        let (ids, mut targets) = batch(100 + 10 * micro, seq);
        let lengths = lengths.map(|lengths| lengths[micro as usize]);
        for (row, targets) in targets.chunks_mut(seq).enumerate() {
            targets[lengths.map_or(seq, |lengths| lengths[row] as usize)..].fill(-100);
        }
        let mut on_device = Batch::upload(&memory, &cpu, shape, &ids, &targets).unwrap();
        if let Some(lengths) = lengths {
            on_device = on_device.with_lengths(&memory, &cpu, &lengths).unwrap();
        }
        let loss = StepLoss {
            sums: loss.view_mut(),
            are_first: [micro == 0; 4],
            micro_batches: 2,
            gradient_scale: on_device_scale.view(),
            of_head: HeadLoss::NextTokens,
        };
        let policy = Policy::with_layers(
            config.labels(),
            "core_attn",
            &BTreeMap::new(),
            config.layers,
        )
        .unwrap();
        let (architecture, dtype) = (model.architecture(), model.dtype());
        let mut saved = architecture
            .lease_saved(
                &memory,
                dtype,
                &policy,
                (shape, &[model::HeldBlocks::all(architecture.blocks.len())]),
            )
            .unwrap();
        let work = Work {
            memory: &memory,
            kernels: &cpu,
            weights: &mut weights,
            order: Rc::default(),
            saved: &mut saved,
            layers: 0..model.layers(),
            batches: std::slice::from_ref(&on_device),
            purpose: Purpose::Training(Training {
                gradients: &mut summed,
                optimizer: None,
                is_first_micro_batch: true,
                is_last_micro_batch: micro == 1,
                losses: vec![loss],
                deferred: None,
                is_stopped: &|| false,
            }),
        };
        model.forward_backward(work, &mut replayed).unwrap();
        let oracle = Oracle {
            config,
            vars: &vars,
            is_parallel: false,
            routers: Default::default(),
        };
        let sum = oracle.loss_sum(&ids, &targets, (ROWS, seq)).unwrap();
        if parts > 1 {
            let lengths = lengths.unwrap_or([seq as i32; ROWS]);
            let lengths = lengths.map(|length| length as usize);
            let added = oracle.router_loss(&lengths, seq).unwrap();
            of_routers = (of_routers + (added / 2.0).unwrap()).unwrap();
        }
        expected_loss = Some(match expected_loss {
            None => sum,
            Some(before) => (before + sum).unwrap(),
        });
    }
    let expected_loss = expected_loss.unwrap();

    let mut actual = vec![0f32; parts];
    let bytes = bytemuck::cast_slice_mut(&mut actual);
    cpu.download(bytes, loss.view()).unwrap();
    let expected_routers = of_routers.to_scalar::<f64>().unwrap();
    let added: f32 = actual[1..].iter().sum();
    assert!(
        (f64::from(added) - expected_routers).abs() <= TOLERANCE * expected_routers,
        "{name}: routers add {added} or {expected_routers}"
    );
    let expected = expected_loss.to_scalar::<f64>().unwrap();
    let error = (f64::from(actual[0]) / expected - 1.0).abs();
    println!("{name}: loss {expected:.4}, off by {error:.1e}");
    assert!(
        error < TOLERANCE,
        "{name}: loss {} or {expected}",
        actual[0]
    );

    assert!(summed.missing().is_empty());
    let total = ((expected_loss * f64::from(scale)).unwrap() + of_routers).unwrap();
    vars.retain(|name, _| !name.ends_with("e_score_correction_bias"));
    let expected = gradients(&total, &vars).unwrap();
    assert_eq!(expected.len(), summed_entries(layout).count());
    let mut worst = (0.0, "");
    for (index, entry) in summed_entries(layout) {
        let (actual, expected) = (summed.view(index), &expected[&entry.name]);
        let actual = actual.slice::<f32>();
        assert_eq!(actual.len(), expected.len());
        let largest = expected
            .iter()
            .fold(0f64, |most, value| most.max(value.abs()));
        assert!(largest > 1e-3, "{name}: {} says little", entry.name);
        let differences = actual
            .iter()
            .zip(expected)
            .map(|(a, b)| (f64::from(*a) - b).abs());
        let difference = differences.fold(0.0, |a: f64, b| if b > a || b.is_nan() { b } else { a });
        let error = difference / largest;
        assert!(
            error < TOLERANCE,
            "{name}: {} is off by {error:.1e}",
            entry.name
        );
        if error > worst.0 {
            worst = (error, &entry.name);
        }
    }
    println!(
        "{name}: gradients at most off by {:.1e}, {}",
        worst.0, worst.1
    );
}

/// What has a gradient.
fn summed_entries(layout: &memory::Layout) -> impl Iterator<Item = (usize, &memory::Entry)> {
    let entries = layout.entries().iter().enumerate();
    entries.filter(|(_, entry)| entry.role.is_trained())
}

/// Whether the layout has the weights of q, k and v, their biases, and the weights of gate and up side by side: then their
/// products are one, else they write columns of one tensor.
fn lie_together(config: &ModelConfig) -> [bool; 3] {
    let architecture = Architecture::of(config, Attention::Eager);
    let layout = architecture.parameters.layout(|_, _| false);
    let joined = |names: &[&str]| {
        let entry = |name: &&str| layout.find(&format!("model.layers.1.{name}"));
        let entries: Option<Vec<usize>> = names.iter().map(entry).collect();
        entries.is_some_and(|entries| layout.joined(&entries).is_some())
    };
    let qkv = |what: &str| {
        let names = ["q", "k", "v"].map(|which| format!("self_attn.{which}_proj.{what}"));
        joined(&names.each_ref().map(String::as_str))
    };
    let gate_up = joined(&["mlp.gate_proj.weight", "mlp.up_proj.weight"]);
    [qkv("weight"), qkv("bias"), gate_up]
}

#[test]
fn a_plain_model() {
    assert_eq!(lie_together(&plain()), [false; 3]);
    assert_agrees("plain", &plain());
}

#[test]
fn with_biases_as_qwen2() {
    let config = ModelConfig {
        qkv_bias: true,
        rope_theta: 500.0,
        ..plain()
    };
    assert_agrees("bias", &config);
}

#[test]
fn with_query_and_key_norms_as_qwen3() {
    let config = ModelConfig {
        qk_norm: true,
        heads: 4,
        kv_heads: 2,
        norm_eps: 1e-2,
        ..plain()
    };
    assert_agrees("norm", &config);
}

#[test]
fn tied_with_scaled_rotary_embedding_as_llama_3() {
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position: 64,
    };
    let config = ModelConfig {
        tie_embeddings: true,
        rope_scaling: Some(scaling),
        ..plain()
    };
    assert_agrees("tied, scaled", &config);
}

/// One layer of three sees everything.
#[test]
fn with_sliding_windows_in_some_layers() {
    for window in [2, 5, SEQ - 1] {
        let config = ModelConfig {
            layers: 3,
            qkv_bias: true,
            sliding_window: Some(window),
            full_attention_layers: vec![1],
            ..plain()
        };
        assert_agrees(&format!("a window of {window}"), &config);
    }
}

#[test]
fn with_biases_everywhere_as_llama_with_attention_bias() {
    let config = ModelConfig {
        qkv_bias: true,
        o_bias: true,
        mlp_bias: true,
        ..plain()
    };
    assert_agrees("all biases", &config);
}

#[test]
fn with_linear_and_yarn_scaling() {
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        original_max_position: 64,
        beta_fast: 4.0,
        beta_slow: 1.0,
        attention_factor: None,
        mscale_all_dim: None,
        truncate: true,
    };
    for scaling in [RopeScaling::Linear { factor: 3.0 }, yarn] {
        let config = ModelConfig {
            rope_theta: 500.0,
            rope_scaling: Some(scaling.clone()),
            ..plain()
        };
        assert_agrees(&format!("{scaling:?}"), &config);
    }
}

/// Three of four layers have a window and a rotary embedding of their own, and are not stretched.
#[test]
fn with_norms_behind_and_rotary_embeddings_by_kind_as_olmo_3() {
    let config = ModelConfig {
        layers: 4,
        heads: 4,
        kv_heads: 2,
        head_dim: 10,
        qk_norm: true,
        qk_norm_over: QkNormExtent::All,
        norm_placement: NormPlacement::After,
        sliding_window: Some(5),
        full_attention_layers: vec![3],
        window_rope_theta: Some(70.0),
        rope_theta: 500.0,
        rope_scaling: Some(RopeScaling::Linear { factor: 3.0 }),
        ..plain()
    };
    assert_agrees("norms behind", &config);
}

/// Caps are small enough to bend most scores and logits.
#[test]
fn with_norms_on_both_sides_and_caps_as_gemma_2() {
    let config = ModelConfig {
        heads: 4,
        kv_heads: 2,
        head_dim: 10,
        tie_embeddings: true,
        norm_placement: NormPlacement::Both,
        zero_centered_norm: true,
        activation: ActivationFunction::GegluTanh,
        scale_embedding: true,
        attention_multiplier: Some(0.7),
        attn_logit_softcapping: Some(0.5),
        final_logit_softcapping: Some(0.8),
        sliding_window: Some(5),
        full_attention_layers: vec![1],
        ..plain()
    };
    assert_agrees("norms on both sides, and caps", &config);
}

/// Norms of queries and keys add 1 too; layers with a window have a rotary embedding of their own.
#[test]
fn with_norms_on_both_sides_as_gemma_3() {
    let config = ModelConfig {
        layers: 3,
        heads: 4,
        kv_heads: 2,
        head_dim: 10,
        qk_norm: true,
        qkv_bias: true,
        o_bias: true,
        norm_placement: NormPlacement::Both,
        zero_centered_norm: true,
        activation: ActivationFunction::GegluTanh,
        scale_embedding: true,
        sliding_window: Some(5),
        full_attention_layers: vec![2],
        window_rope_theta: Some(70.0),
        rope_theta: 500.0,
        rope_scaling: Some(RopeScaling::Linear { factor: 3.0 }),
        ..plain()
    };
    assert_agrees("norms on both sides", &config);
}

/// Clamps are near enough to bend many gates, and sinks take much of each row.
#[test]
fn with_sinks_and_biases_of_experts_as_gpt_oss() {
    let config = ModelConfig {
        heads: 4,
        kv_heads: 2,
        qkv_bias: true,
        o_bias: true,
        attention_sinks: true,
        sliding_window: Some(5),
        full_attention_layers: vec![1],
        activation: ActivationFunction::ClampedSwiglu,
        swiglu_alpha: 1.3,
        swiglu_limit: 0.3,
        experts: Some(ExpertsConfig {
            biases: true,
            ..ExpertsConfig::plain([5, 2, 14])
        }),
        ..plain()
    };
    assert_agrees("gpt-oss", &config);
}

/// The temperature begins to act at the 5th token.
#[test]
fn with_a_temperature_of_queries_as_ministral_3() {
    let config = ModelConfig {
        rope_scaling: Some(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 4,
        }),
        query_temperature: Some(0.6),
        ..plain()
    };
    assert_agrees("temperature", &config);
}

#[test]
fn with_layers_that_do_not_turn_as_smollm3() {
    let config = ModelConfig {
        no_rope_layers: vec![1],
        ..plain()
    };
    assert_agrees("layers that do not turn", &config);
}

#[test]
fn with_multipliers_as_granite() {
    let config = ModelConfig {
        qkv_bias: true,
        o_bias: true,
        mlp_bias: true,
        tie_embeddings: true,
        embedding_multiplier: 7.0,
        residual_multiplier: 0.3,
        attention_multiplier: Some(0.4),
        logits_scaling: 3.0,
        ..plain()
    };
    assert_agrees("multipliers", &config);
}

/// A share of each head is turned, with norms before or without, and pairs are stretched each by a factor of its own.
#[test]
fn with_a_share_of_each_head_turned() {
    for (qk_norm, original) in [(false, SEQ), (true, SEQ - 1)] {
        let config = ModelConfig {
            qk_norm,
            rotary_share: 0.6,
            rope_scaling: Some(RopeScaling::LongRope {
                factor: 4.0,
                original_max_position: original,
                short_factor: (0..6).map(|pair| 1.0 + 0.1 * f64::from(pair)).collect(),
                long_factor: (0..6).map(|pair| 1.5 + 2.0 * f64::from(pair)).collect(),
                attention_factor: None,
            }),
            ..plain()
        };
        assert_agrees(&format!("a share, {qk_norm}"), &config);
    }
}

/// Two layers with the gated delta rule around one with gated attention; projections of the rule are by key head or not.
/// Heads of keys are wide enough that none is nearly zero: its norm would magnify what f32 rounds beyond the tolerance.
#[test]
fn with_the_gated_delta_rule_as_qwen3_next_and_qwen3_5() {
    for by_key_head in [true, false] {
        let config = ModelConfig {
            layers: 3,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            qk_norm: true,
            zero_centered_norm: true,
            attention_gate: true,
            norm_eps: 1e-2,
            rotary_share: 0.25,
            delta: Some(DeltaConfig {
                key_heads: 2,
                value_heads: 4,
                key_head_dim: 16,
                value_head_dim: 12,
                conv_width: 3,
                attention_layers: vec![1],
                by_key_head,
            }),
            ..plain()
        };
        let name = format!("the gated delta rule, {by_key_head}");
        assert_agrees(&name, &config);
        let name = format!("{name}, {LONG} tokens");
        assert_agrees_with(&name, &config, Attention::Flash, (LONG, None));
    }
}

#[test]
fn everything_at_once() {
    let config = ModelConfig {
        tie_embeddings: true,
        qkv_bias: true,
        qk_norm: true,
        ..plain()
    };
    assert_agrees("everything", &config);
}

/// All sizes are multiples of the layout's padding.
#[test]
fn with_weights_and_biases_side_by_side() {
    let config = ModelConfig {
        hidden: 32,
        heads: 4,
        kv_heads: 2,
        head_dim: 128,
        ffn: 72,
        qkv_bias: true,
        ..plain()
    };
    assert_eq!(lie_together(&config), [true; 3]);
    assert_agrees("side by side", &config);
}

/// As in Qwen2.5-0.5B, whose keys are 128 wide.
#[test]
fn with_weights_side_by_side_and_biases_apart() {
    let config = ModelConfig {
        hidden: 64,
        ffn: 68,
        qkv_bias: true,
        ..plain()
    };
    assert_eq!(lie_together(&config), [true, false, true]);
    assert_agrees("biases apart", &config);
    let with_norms = ModelConfig {
        qk_norm: true,
        ..config
    };
    assert_agrees("biases apart, norms", &with_norms);
}

/// Mixtral's: the weights of the chosen add up to 1, every layer has experts.
fn experts() -> ExpertsConfig {
    ExpertsConfig::plain([4, 2, 25])
}

#[test]
fn experts_as_mixtral() {
    for aux in [0.0, 0.3] {
        let config = ModelConfig {
            router_aux: aux,
            experts: Some(experts()),
            ..plain()
        };
        assert_agrees(&format!("Mixtral, {aux}"), &config);
    }
}

#[test]
fn one_expert_all_experts_and_a_single_choice() {
    for (count, chosen) in [(1, 1), (3, 3), (5, 1)] {
        let config = ModelConfig {
            router_aux: 0.2,
            router_z_loss: 0.1,
            experts: Some(ExpertsConfig {
                count,
                chosen,
                normed: false,
                ..experts()
            }),
            ..plain()
        };
        assert_agrees(&format!("{chosen} of {count}"), &config);
    }
}

#[test]
fn experts_as_qwen2_moe_beside_a_dense_layer() {
    let config = ModelConfig {
        layers: 3,
        qkv_bias: true,
        router_aux: 0.2,
        router_aux_kind: RouterAuxKind::Layer,
        router_z_loss: 0.1,
        experts: Some(ExpertsConfig {
            shared_ffn: 31,
            shared_gate: true,
            normed: false,
            dense_layers: vec![1],
            ..experts()
        }),
        ..plain()
    };
    assert_agrees("Qwen2-MoE", &config);
}

/// Padding has no part in any loss of routers.
#[test]
fn losses_of_routers_leave_padding_out() {
    for kind in [
        RouterAuxKind::Pooled,
        RouterAuxKind::Layer,
        RouterAuxKind::Sequence,
    ] {
        let config = ModelConfig {
            router_aux: 0.2,
            router_aux_kind: kind,
            router_z_loss: 0.1,
            experts: Some(experts()),
            ..plain()
        };
        let lengths = Some([[SEQ as i32, 5], [11, 24]]);
        let name = format!("{kind:?}");
        assert_agrees_with(&name, &config, Attention::Flash, (SEQ, lengths));
    }
}

#[test]
fn latents_and_groups_as_deepseek() {
    let latent = LatentConfig {
        kv: 19,
        q: None,
        rotary_dim: 6,
        v_head_dim: 13,
        neighbours: true,
    };
    let v2 = ModelConfig {
        kv_heads: 3,
        layers: 3,
        rope_theta: 500.0,
        rope_scaling: Some(RopeScaling::Yarn {
            factor: 4.0,
            original_max_position: 64,
            beta_fast: 4.0,
            beta_slow: 1.0,
            attention_factor: Some(1.3),
            mscale_all_dim: Some(0.7),
            truncate: true,
        }),
        experts: Some(ExpertsConfig {
            count: 6,
            shared_ffn: 50,
            normed: false,
            factor: 1.7,
            groups: 3,
            chosen_groups: 2,
            dense_layers: vec![0],
            ..experts()
        }),
        latent: Some(latent.clone()),
        ..plain()
    };
    assert_agrees("DeepSeek-V2", &v2);
    let v3 = ModelConfig {
        rope_scaling: None,
        router_aux: 0.2,
        router_aux_kind: RouterAuxKind::Sequence,
        experts: v2.experts.clone().map(|experts| ExpertsConfig {
            score: ScoreKind::Sigmoid,
            normed: true,
            biases: false,
            choice_bias: true,
            ..experts
        }),
        latent: Some(LatentConfig {
            q: Some(27),
            neighbours: false,
            ..latent
        }),
        ..v2
    };
    assert_agrees("DeepSeek-V3", &v3);
}
