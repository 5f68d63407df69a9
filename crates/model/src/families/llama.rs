//! Llama, and the families that differ from it in a few switches: Mistral (sliding windows), Qwen2 (biases of q, k and
//! v), Qwen3 (norms of q and k), Phi-3 (q, k and v are one matrix in files, gate and up another). With experts in place of
//! the feed-forward layer: Mixtral, Qwen2-MoE, Qwen3-MoE; and with latent attention too: DeepSeek-V2 and V3.

use crate::parameters::{ExpertFiles, Initial, Parameters, PartParameters};
use crate::stages::{
    Attention, CoreAttention, Embedding, ExpertActivation, ExpertLinear, ExpertsDown, ExpertsUp,
    Head, HeadNorms, LatentDown, LatentHeads, LatentUp, MlpActivation, Norm, NormStage, Projection,
    Qkv, ResidualProjection, Rotary, RouterChoice, RouterTables,
};
use crate::{
    Activation, ActivationFunction, Architecture, AttentionSpec, Block, BlockSpec, DropoutSite,
    ExpertsConfig, Family, FeedForwardSpec, Fp8Layer, LatentConfig, Linear, ModelConfig, SharingRanks,
    Stage,
};
use crate::hugging_face::ExpertNames;
use memory::Layer;
use std::rc::Rc;

const X: Activation = Activation::X;
const X2: Activation = ResidualProjection::X2;
const H1: Activation = NormStage::H1;
const RSTD1: Activation = NormStage::RSTD1;
const H2: Activation = NormStage::H2;
const RSTD2: Activation = NormStage::RSTD2;

pub(super) fn architecture(
    config: &ModelConfig,
    blocks: &[Rc<BlockSpec>],
    attention: Attention,
    mut parameters: Parameters,
) -> Architecture {
    let matrix = [config.vocab, config.hidden];
    let mut first = parameters.of_part(Layer::Embedding, "model.");
    let embedding = Embedding::declare(&mut first, "embed_tokens.weight", matrix);
    let block = |(layer, spec): (usize, &Rc<BlockSpec>)| {
        let part = Layer::Block(layer);
        let mut own = parameters.of_part(part, format!("model.layers.{layer}."));
        Block::new(config.hidden, stages(config, spec, attention, &mut own))
    };
    let blocks = blocks.iter().enumerate().map(block).collect();
    let mut last = parameters.of_part(Layer::Head, "");
    let head = Head {
        norm: Norm::rms(&mut last, "model.norm", config.hidden, config.norm_eps),
        linear: match config.tie_embeddings {
            true => Linear::tied(embedding.tokens, matrix),
            false => Linear::declare(&mut last, "lm_head", matrix, false),
        },
    };
    let rotary = Rotary {
        head_dim: config.rotary_dim(),
        theta: config.rope_theta,
        scaling: config.rope_scaling.clone(),
    };
    let embedding = Box::new(embedding);
    let labels = parameters.labels(config.labels());
    Architecture::new(labels, parameters, embedding, blocks, head)
        .with_rotary(rotary)
        .with_router_losses(config.router_losses())
}

/// x2 = x + attention(norm(x)), next x = x2 + feed_forward(norm(x2)), or next x = x2 + experts(norm(x2)).
fn stages(
    config: &ModelConfig,
    spec: &BlockSpec,
    kind: Attention,
    own: &mut PartParameters,
) -> Vec<Box<dyn Stage>> {
    let (hidden, attention) = (config.hidden, &spec.attention);
    let norm = |own: &mut PartParameters, name, of: [_; 3], parameter| {
        normed(own, name, of, (parameter, hidden, config.norm_eps))
    };
    let mut attn_norm = norm(own, "attn_norm", [X, H1, RSTD1], "input_layernorm");
    let mut stages: Vec<Box<dyn Stage>> = Vec::new();
    let latents = match &attention.latent {
        None => {
            let qkv = qkv(config, attention, own);
            attn_norm.norm.read_by = qkv.linear.fp8_reader();
            stages.extend([Box::new(attn_norm) as Box<dyn Stage>, Box::new(qkv)]);
            None
        }
        Some(latent) => {
            let (made, heads) = latents(hidden, attention, latent, own);
            stages.push(Box::new(attn_norm));
            stages.extend(made);
            Some(heads)
        }
    };
    let (o_width, o_bias) = (attention.o_width(), attention.o_bias);
    stages.extend([
        Box::new(CoreAttention {
            kind,
            attention: attention.clone(),
            dropout: DropoutSite::NONE,
            latents,
            ranks: SharingRanks::ALONE,
        }) as Box<dyn Stage>,
        Box::new(ResidualProjection {
            name: "attn_out",
            input: CoreAttention::O,
            residual: X,
            output: X2,
            linear: Linear::declare(own, "self_attn.o_proj", [hidden, o_width], o_bias)
                .in_fp8(own, Fp8Layer::AttnOut),
            dropout: DropoutSite::NONE,
        }),
    ]);
    let mlp_norm = norm(own, "mlp_norm", [X2, H2, RSTD2], "post_attention_layernorm");
    match &spec.experts {
        None => stages.extend(dense(hidden, mlp_norm, &spec.feed_forward, own)),
        Some(experts) => {
            stages.push(Box::new(mlp_norm));
            stages.extend(experts_of(config, experts, own));
        }
    }
    stages
}

/// A norm, by its input, output and statistic, and by its parameter, width and epsilon.
fn normed(
    own: &mut PartParameters,
    name: &'static str,
    [input, output, rstd]: [Activation; 3],
    (parameter, width, eps): (&str, usize, f64),
) -> NormStage {
    NormStage {
        name,
        norm: Norm::rms(own, parameter, width, eps),
        input,
        output,
        statistics: vec![rstd],
    }
}

/// down(silu(gate) up), of the norm before.
fn dense(
    hidden: usize,
    mut norm: NormStage,
    spec: &FeedForwardSpec,
    own: &mut PartParameters,
) -> [Box<dyn Stage>; 4] {
    let (ffn, bias) = (spec.width, spec.bias);
    let up = match spec.is_fused {
        true => Linear::declare(own, "mlp.gate_up_proj", [2 * ffn, hidden], bias),
        false => {
            let parts = ["mlp.gate_proj", "mlp.up_proj"].map(|name| (name, ffn));
            Linear::declare_together(own, parts, hidden, bias)
        }
    };
    let up = up.in_fp8(own, Fp8Layer::MlpUp);
    let down = Linear::declare(own, "mlp.down_proj", [hidden, ffn], bias);
    let down = down.in_fp8(own, Fp8Layer::MlpDown);
    let made_by = up.fp8_layer();
    norm.norm.read_by = up.fp8_reader();
    [
        Box::new(norm),
        Box::new(Projection {
            name: "mlp_up",
            input: H2,
            output: MlpActivation::GATE_UP,
            linear: up,
            in_f32: false,
        }),
        Box::new(MlpActivation {
            function: ActivationFunction::Swiglu,
            width: ffn,
            read_by: down.fp8_reader(),
            made_by,
        }),
        Box::new(ResidualProjection {
            name: "mlp_down",
            input: MlpActivation::ACT,
            residual: X2,
            output: Activation::NEXT_X,
            linear: down,
            dropout: DropoutSite::NONE,
        }),
    ]
}

/// The router, the experts that it chooses, and the shared ones. Parameters have the names that transformers gives them.
fn experts_of(
    config: &ModelConfig,
    experts: &ExpertsConfig,
    own: &mut PartParameters,
) -> Vec<Box<dyn Stage>> {
    let (hidden, ffn) = (config.hidden, experts.ffn);
    let (count, choices) = (experts.count, experts.chosen);
    let ExpertNames { module, up, down } = names_of_experts(config);
    let gate = format!("{module}.gate");
    let files = |end, parts| ExpertFiles { end, module, parts };
    let up = files("mlp.experts.gate_up_proj", up);
    let down = files("mlp.experts.down_proj", down);
    let mut stages: Vec<Box<dyn Stage>> = vec![
        Box::new(Projection {
            name: "moe_router",
            input: H2,
            output: RouterChoice::LOGITS,
            linear: Linear::declare(&mut own.without_adapters(), &gate, [count, hidden], false),
            in_f32: true,
        }),
        Box::new(RouterChoice {
            name: "moe_choice",
            logits: RouterChoice::LOGITS,
            weights: RouterChoice::WEIGHTS,
            ids: RouterChoice::IDS,
            experts: count,
            routing: experts.routing(),
            bias: experts.choice_bias.then(|| {
                let name = format!("{gate}.e_score_correction_bias");
                own.buffer(&name, &[count], Initial::Zero)
            }),
            is_router: true,
        }),
        Box::new(RouterTables {
            experts: count,
            choices,
        }),
        Box::new(ExpertsUp {
            linear: ExpertLinear::declare(own, up.end, [count, 2 * ffn, hidden], up),
            input: H2,
            choices,
        }),
        Box::new(ExpertActivation {
            name: "moe_act",
            input: ExpertsUp::GATE_UP,
            output: ExpertActivation::ACT,
            weights: Some((RouterChoice::WEIGHTS, Some(RouterTables::ROW_SLOT))),
            choices,
            width: ffn,
        }),
    ];
    let linear = ExpertLinear::declare(own, down.end, [count, hidden, ffn], down);
    stages.extend(shared_experts(hidden, experts, own));
    let shared = (experts.shared_ffn > 0).then(|| {
        let name = format!("{}.down_proj", shared_name(experts));
        Linear::declare(own, &name, [hidden, experts.shared_ffn], false)
    });
    stages.push(Box::new(ExpertsDown {
        linear,
        shared,
        residual: X2,
        choices,
    }));
    stages
}

/// How files name experts. A test's model may have features that no family has.
fn names_of_experts(config: &ModelConfig) -> ExpertNames {
    let family = config.family();
    family.map_or(ExpertNames::USUAL, Family::experts)
}

/// Qwen2-MoE has one shared expert, and DeepSeek several, which are one matrix in its files too.
fn shared_name(experts: &ExpertsConfig) -> &'static str {
    match experts.shared_gate {
        true => "mlp.shared_expert",
        false => "mlp.shared_experts",
    }
}

/// The shared experts, up to their activation, and their gate.
fn shared_experts(
    hidden: usize,
    experts: &ExpertsConfig,
    own: &mut PartParameters,
) -> Vec<Box<dyn Stage>> {
    let width = experts.shared_ffn;
    if width == 0 {
        return Vec::new();
    }
    let mut stages: Vec<Box<dyn Stage>> = Vec::new();
    if experts.shared_gate {
        stages.push(Box::new(Projection {
            name: "shared_gate",
            input: H2,
            output: RouterChoice::SHARED_LOGITS,
            linear: Linear::declare(
                &mut own.without_adapters(),
                "mlp.shared_expert_gate",
                [1, hidden],
                false,
            ),
            in_f32: true,
        }));
        stages.push(Box::new(RouterChoice {
            name: "shared_weight",
            logits: RouterChoice::SHARED_LOGITS,
            weights: RouterChoice::SHARED_WEIGHTS,
            ids: RouterChoice::SHARED_IDS,
            experts: 1,
            routing: ExpertsConfig::GATE,
            bias: None,
            is_router: false,
        }));
    }
    let parts = ["gate_proj", "up_proj"].map(|part| format!("{}.{part}", shared_name(experts)));
    let parts = parts.iter().map(|name| (name.as_str(), width));
    stages.push(Box::new(Projection {
        name: "shared_up",
        input: H2,
        output: ExpertActivation::SHARED_GATE_UP,
        linear: Linear::declare_together(own, parts, hidden, false),
        in_f32: false,
    }));
    let weights = experts
        .shared_gate
        .then_some((RouterChoice::SHARED_WEIGHTS, None));
    stages.push(Box::new(ExpertActivation {
        name: "shared_act",
        input: ExpertActivation::SHARED_GATE_UP,
        output: ExpertActivation::SHARED_ACT,
        weights,
        choices: 1,
        width,
    }));
    stages
}

/// The norms of latents have this epsilon, whatever the model's others have.
const LATENT_EPS: f64 = 1e-6;

/// Latents, their norms, and queries, keys and values from them; and the matrix of keys and values.
fn latents(
    hidden: usize,
    attention: &AttentionSpec,
    latent: &LatentConfig,
    own: &mut PartParameters,
) -> (Vec<Box<dyn Stage>>, LatentHeads) {
    let mut stages: Vec<Box<dyn Stage>> =
        vec![Box::new(LatentDown::declare(own, H1, hidden, latent))];
    if let Some(width) = latent.q {
        let of = [LatentDown::Q_A, LatentDown::C_Q, LatentDown::RSTD_Q];
        let parameter = ("self_attn.q_a_layernorm", width, LATENT_EPS);
        stages.push(Box::new(normed(own, "mla_q_norm", of, parameter)));
    }
    let of = [LatentDown::KV_A, LatentDown::C_KV, LatentDown::RSTD_KV];
    let parameter = ("self_attn.kv_a_layernorm", latent.kv, LATENT_EPS);
    stages.push(Box::new(normed(own, "mla_kv_norm", of, parameter)));
    let up = LatentUp::declare(own, (hidden, H1), attention, latent);
    let heads = up.heads.clone();
    stages.push(Box::new(up));
    (stages, heads)
}

fn qkv(config: &ModelConfig, attention: &AttentionSpec, own: &mut PartParameters) -> Qkv {
    let (head_dim, has_bias) = (attention.qk_head_dim, attention.qkv_bias);
    let [k_width, v_width] = attention.kv_widths();
    let parts = [
        ("self_attn.q_proj", attention.q_width()),
        ("self_attn.k_proj", k_width),
        ("self_attn.v_proj", v_width),
    ];
    let linear = match attention.is_fused {
        true => {
            let width = parts.iter().map(|(_, width)| width).sum();
            let shape = [width, config.hidden];
            Linear::declare(own, "self_attn.qkv_proj", shape, has_bias)
        }
        false => Linear::declare_together(own, parts, config.hidden, has_bias),
    };
    let linear = linear.in_fp8(own, Fp8Layer::Qkv);
    let norm = |which| {
        let name = format!("self_attn.{which}_norm");
        Norm::rms(own, &name, head_dim, config.norm_eps)
    };
    Qkv {
        input: H1,
        linear,
        kv_widths: [k_width, v_width],
        head_dim,
        norms: attention.qk_norm.then(|| HeadNorms {
            norms: ["q", "k"].map(norm),
            head_dim,
        }),
        is_rotary: attention.is_rotary,
    }
}
