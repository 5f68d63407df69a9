//! What the tests of the trainer as a library share: settings, sessions, data.

pub mod covering;
pub mod distance;
pub mod elsewhere;
pub mod experts;
pub mod factors;
pub mod frozen;
pub mod golden;
pub mod ranks;
pub mod side_by_side;

use collectives::Group;
use data::{MASKED, MicroBatch, Packing, StepBatch};
use fakes::Threads;
use kernels::{Target, Traffic};
use memory::{DType, Homes, Memory};
use model::{
    Activation, ActivationFunction, Architecture, Attention, DeltaConfig, Label, Labels,
    ModelConfig, NormKind, NormPlacement, OffloadLabels, Policy, PositionKind, QkNormExtent,
    RopeScaling,
};
use optim::{Schedule, ScheduleKind};
use planner::{Fix, Plan, choose};
use session::{Session, StepOutcome};
use settings::{AttentionBackend, AutoOr, Config, Device, FloatType, Settings};
use side_by_side::side_by_side;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Recompute modes of every form.
pub const MODES: [&str; 15] = [
    "none",
    "core_attn",
    "layernorm",
    "mlp",
    "core_attn,layernorm",
    "core_attn,mlp",
    "layernorm,mlp",
    "core_attn,layernorm,mlp",
    "qkv",
    "attn_out",
    "mlp_act",
    "qkv,attn_out,mlp_act",
    "full:block:1",
    "full:uniform:2",
    "full",
];

/// Both compute types.
pub const DTYPES: [DType; 2] = [DType::F32, DType::BF16];

/// Both kinds of attention.
pub const ATTENTIONS: [Attention; 2] = [Attention::Eager, Attention::Flash];

/// A small model in which no two widths agree: grouped queries, heads that do not add up to the hidden width, odd
/// sizes.
pub fn odd_model(layers: usize) -> ModelConfig {
    ModelConfig {
        hidden: 52,
        layers,
        heads: 3,
        kv_heads: 1,
        head_dim: 20,
        ffn: 151,
        vocab: 131,
        init_std: 0.1,
        ..ModelConfig::PLAIN
    }
}

/// The odd model with the gated delta rule in all layers but one, whose attention has a gate (Qwen3.5).
pub fn hybrid(layers: usize) -> ModelConfig {
    ModelConfig {
        heads: 4,
        kv_heads: 2,
        qk_norm: true,
        zero_centered_norm: true,
        attention_gate: true,
        rotary_share: 0.5,
        delta: Some(DeltaConfig {
            key_heads: 4,
            value_heads: 16,
            key_head_dim: 8,
            value_head_dim: 5,
            conv_width: 4,
            attention_layers: vec![1],
            by_key_head: false,
        }),
        ..odd_model(layers)
    }
}

/// Every activation that some model has, under either kind of attention.
pub fn every_activation(models: &[(&'static str, ModelConfig)]) -> Vec<Activation> {
    let mut all = Vec::new();
    for (_, model) in models {
        for attention in [Attention::Eager, Attention::Flash] {
            let architecture = Architecture::of(model, attention);
            for block in &architecture.blocks {
                let new = block.activations().map(|(activation, _)| activation);
                all.extend(new.filter(|one| !all.contains(one)).collect::<Vec<_>>());
            }
        }
    }
    all
}

/// The number of [`variants`].
pub const VARIANTS: usize = 9;

/// The labels of all of them.
pub const OF_VARIANTS: Labels = Labels::new(&[
    Label::BLOCK_INPUT,
    Label::LAYERNORM,
    Label::QKV,
    Label::CORE_ATTN,
    Label::ATTN_VALUE,
    Label::GDN_NORM_OUT,
    Label::NORM_INPUT,
    Label::ATTN_OUT,
    Label::MLP,
    Label::MLP_ACT,
]);

/// The odd model with the features that families of models differ in.
pub fn variants(layers: usize) -> [(&'static str, ModelConfig); VARIANTS] {
    let plain = odd_model(layers);
    let bias = ModelConfig {
        qkv_bias: true,
        o_bias: true,
        mlp_bias: true,
        ..plain.clone()
    };
    // The first layers see everything, the others a window.
    let norm = ModelConfig {
        qk_norm: true,
        heads: 4,
        kv_heads: 2,
        sliding_window: Some(9),
        full_attention_layers: (0..layers / 2).collect(),
        ..plain.clone()
    };
    // As SmolLM3, whose first layer does not turn here.
    let tied = ModelConfig {
        tie_embeddings: true,
        no_rope_layers: vec![0],
        ..plain.clone()
    };
    // As OLMo 3: all but the last layer have a window, and a rotary embedding of their own.
    let behind = ModelConfig {
        norm_placement: NormPlacement::After,
        qk_norm: true,
        qk_norm_over: QkNormExtent::All,
        sliding_window: Some(9),
        full_attention_layers: vec![layers - 1],
        window_rope_theta: Some(90.0),
        rope_scaling: Some(RopeScaling::Linear { factor: 3.0 }),
        ..plain.clone()
    };
    // As Granite.
    let multipliers = ModelConfig {
        embedding_multiplier: 3.0,
        residual_multiplier: 0.4,
        attention_multiplier: Some(0.3),
        logits_scaling: 2.0,
        ..plain.clone()
    };
    // As Gemma 2.
    let both = ModelConfig {
        heads: 4,
        kv_heads: 2,
        norm_placement: NormPlacement::Both,
        zero_centered_norm: true,
        activation: ActivationFunction::GegluTanh,
        scale_embedding: true,
        attention_multiplier: Some(0.5),
        attn_logit_softcapping: Some(2.0),
        final_logit_softcapping: Some(3.0),
        sliding_window: Some(9),
        full_attention_layers: vec![layers - 1],
        ..plain.clone()
    };
    // As Phi-4-mini: 12 of the 16 columns of a head are turned.
    let share = ModelConfig {
        head_dim: 16,
        fused_projections: true,
        rotary_share: 0.75,
        rope_scaling: Some(RopeScaling::LongRope {
            factor: 4.0,
            original_max_position: 16,
            short_factor: vec![1.5; 6],
            long_factor: vec![3.0; 6],
            attention_factor: None,
        }),
        ..plain.clone()
    };
    let gpt2 = ModelConfig {
        head_dim: plain.hidden / 4,
        heads: 4,
        kv_heads: 4,
        tie_embeddings: true,
        norm: NormKind::Layer,
        activation: ActivationFunction::GeluTanh,
        positions: PositionKind::Learned,
        max_positions: Some(80),
        biases: true,
        dropout: 0.2,
        ..plain
    };
    [
        ("q/k/v bias", bias),
        ("q/k norm", norm),
        ("tied, without positions", tied),
        ("GPT-2", gpt2),
        ("norms behind", behind),
        ("norms on both sides, caps", both),
        ("multipliers", multipliers),
        ("a share of heads turned", share),
        ("Qwen3.5", hybrid(layers)),
    ]
}

/// A configuration for a model: two rows of 71 tokens (two blocks of attention rows), two micro-batches, a head in two
/// chunks of which the second is short.
pub fn config(model: ModelConfig, dtype: DType, mode: &str) -> Config {
    let mut config = Config {
        model,
        ..Config::default()
    };
    config.train.device = Some(Device::Cpu);
    config.train.dtype = Some(match dtype {
        DType::BF16 => FloatType::Bf16,
        _ => FloatType::F32,
    });
    config.recompute.spec = mode.into();
    config.attention.backend = AttentionBackend::Eager;
    (config.data.seq, config.memory.head_chunk) = (71, AutoOr::Number(100));
    (config.batch.micro, config.batch.accum) = (2, 2);
    (config.lr.peak, config.train.steps) = (3e-3, 100);
    config.optim.f32_states = Vec::new();
    config
}

/// The settings of [`config`].
pub fn settings(model: ModelConfig, dtype: DType, mode: &str) -> Settings {
    Settings::new(&config(model, dtype, mode)).unwrap()
}

/// What `--offload-optimizer pinned` says.
pub fn pinned_states() -> Homes {
    let pinned = Config::default().with(&["offload.optimizer=pinned".into()]);
    Settings::new(&pinned.unwrap()).unwrap().homes
}

/// The same learning rate at every step.
pub fn constant_rate(peak: f64) -> Schedule {
    Schedule {
        kind: ScheduleKind::Constant,
        peak,
        warmup_steps: 0,
        decay_steps: None,
        min_ratio: 0.0,
        total_steps: 100,
    }
}

/// A configuration with a fix for a limit, as a run on the processor would have it: what is to be chosen is.
pub fn fixed(config: &Config, fix: &Fix, limit: u64) -> Settings {
    let config = config.with(&fix.set).unwrap();
    let config = match config.chooses() {
        true => choose(&config, Target::Cpu, limit)
            .unwrap()
            .applied_to(&config),
        false => config,
    };
    Settings::new(&config).unwrap()
}

/// The plan of a run on the CPU.
pub fn plan(settings: &Settings) -> Plan {
    Plan::new(settings, Target::Cpu).unwrap()
}

/// Runs `check` for every variant of the model, type, kind of attention and mode.
pub fn for_every_mode(check: impl Fn(&str, &Settings) + Sync) {
    let mut all = Vec::new();
    for (variant, model) in variants(3) {
        for (dtype, attention) in dtypes_and_attentions() {
            for mode in MODES {
                let name = format!("{variant}, {dtype:?}, {attention:?}, {mode}");
                let settings = settings(model.clone(), dtype, mode);
                all.push((
                    name,
                    Settings {
                        attention,
                        ..settings
                    },
                ));
            }
        }
    }
    side_by_side(all, |(name, settings)| check(&name, &settings));
}

/// Every type with every kind of attention.
pub fn dtypes_and_attentions() -> impl Iterator<Item = (DType, Attention)> {
    let pairs = |dtype| ATTENTIONS.map(|attention| (dtype, attention));
    DTYPES.into_iter().flat_map(pairs)
}

/// Checks a step's memory against the plan.
pub fn assert_as_planned(name: &str, plan: &Plan, outcome: &StepOutcome) {
    let memory = &outcome.memory;
    assert_eq!(memory.peak.bytes, plan.peak_bytes, "{name}");
    assert_eq!(memory.peak.by_category, plan.peak_by_category, "{name}");
    assert_eq!(memory.peak.place.phase, plan.peak_phase, "{name}");
    assert_eq!(memory.peak.place.layer, plan.peak_layer, "{name}");
    assert_eq!(memory.phase_peaks, plan.phase_peak_bytes, "{name}");
    assert_eq!(memory.slab_bytes, plan.slab_bytes, "{name}");
    assert_eq!(memory.host_pinned_bytes, plan.host_pinned_bytes, "{name}");
    assert_eq!(outcome.traffic, crossing(plan), "{name}");
}

/// What the plan says crosses in a step.
pub fn crossing(plan: &Plan) -> Traffic {
    Traffic {
        h2d_bytes: plan.h2d_bytes,
        d2h_bytes: plan.d2h_bytes,
        sent_bytes: plan.ranks.as_ref().map_or(0, |ranks| ranks.sent_bytes),
        disk_read_bytes: plan.disk_read_bytes,
        disk_written_bytes: plan.disk_written_bytes,
    }
}

/// The settings with activations offloaded; none if a label is recomputed.
pub fn offloading(settings: &Settings, labels: &str) -> Option<Settings> {
    let labels = OffloadLabels::parse(labels).unwrap();
    let policy = settings.policy.clone().offload(&labels).ok()?;
    Some(Settings {
        policy,
        ..settings.clone()
    })
}

/// Every label recomputed, as far as it can be, every label offloaded, and whole layers replayed.
pub fn policies(labels: Labels, layers: usize) -> Vec<(String, Policy)> {
    let parse = |text: &str| Policy::with_layers(labels, text, &BTreeMap::new(), layers).unwrap();
    let named = labels.named().map(|label| label.name().to_string());
    let full = ["full", "full:uniform:2", "full:block:3"].map(String::from);
    let recompute = named.chain(full).map(|text| (text.clone(), parse(&text)));
    let offload = labels.iter().map(|label| {
        let offloaded = OffloadLabels::parse_of(labels, label.name()).unwrap();
        let policy = Policy::keep_all_of(labels, layers).offload(&offloaded);
        (format!("offload {}", label.name()), policy.unwrap())
    });
    recompute.chain(offload).collect()
}

/// A session with fresh weights on kernels that run when a seeded scheduler says, in a slab of exactly the planned bytes.
pub fn on_schedule(settings: &Settings, seed: u64) -> Session {
    let alone: Arc<dyn Group> = Threads::with_deadline(1, Duration::from_secs(60)).remove(0);
    let (session, _) = ranks::on_schedule(settings, &alone, seed, None);
    session
        .memory()
        .reserve_slab(plan(settings).slab_bytes)
        .unwrap();
    session
}

/// A session with fresh weights, in a slab of exactly the planned bytes.
pub fn session(settings: &Settings) -> Session {
    let memory = Memory::host();
    let mut session = Session::on_cpu(settings.clone(), &memory).unwrap();
    session.initialise(7).unwrap();
    memory.reserve_slab(plan(settings).slab_bytes).unwrap();
    session
}

/// The batch of a step: random tokens, about one target in nine masked, not equally many in each micro-batch.
pub fn step_batch(settings: &Settings, step: usize) -> StepBatch {
    let mut random = Random(step as u64);
    let tokens = settings.micro_batch * settings.seq;
    let vocab = settings.model.vocab as u64;
    let micro = (0..settings.accum).map(|_| MicroBatch {
        input_ids: (0..tokens).map(|_| random.below(vocab) as i32).collect(),
        targets: (0..tokens)
            .map(|_| match random.below(9) {
                0 => MASKED,
                _ => random.below(vocab) as i32,
            })
            .collect(),
        rows: settings.micro_batch,
        seq: settings.seq,
        part: memory::Rank::ALONE,
        documents: (settings.packing == Packing::FirstFit).then(|| documents(settings)),
        lengths: (settings.packing != Packing::Concatenate)
            .then(|| vec![settings.seq as i32; settings.micro_batch]),
        beside: None,
    });
    micro.collect()
}

/// Where each token's document begins in its row: after two fifths, and after two thirds.
fn documents(settings: &Settings) -> Vec<i32> {
    let starts = [0, 2 * settings.seq / 5, 2 * settings.seq / 3];
    let tokens = (0..settings.micro_batch).flat_map(|_| 0..settings.seq);
    let start = |token| starts.into_iter().rfind(|start| *start <= token);
    tokens
        .map(|token| start(token).unwrap_or(0) as i32)
        .collect()
}

/// A sequence of numbers (SplitMix64).
pub struct Random(pub u64);

impl Random {
    /// The next number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (value ^ (value >> 31)) % limit
    }
}

/// Every parameter's values, in the layout's order.
pub fn parameters(session: &Session) -> Vec<Vec<f32>> {
    (0..session.model().layout().entries().len())
        .map(|index| session.parameter(index).unwrap())
        .collect()
}
