//! Llama, and what differs from it in a few switches: Mistral (sliding windows), Qwen2 (biases of q, k and v), Qwen3 (norms of
//! q and k), Phi-3 (matrices that read the same are one in files).

use crate::parameters::{Parameters, PartParameters};
use crate::stages::{
    Attention, CoreAttention, Embedding, Head, HeadNorms, Norm, NormStage, Projection, Qkv,
    ResidualProjection, Rotary, Swiglu,
};
use crate::{Activation, Architecture, Block, DropoutSite, Labels, Linear, ModelConfig, Stage};
use memory::Layer;

const X: Activation = Activation::X;
const X2: Activation = ResidualProjection::X2;
const H1: Activation = NormStage::H1;
const RSTD1: Activation = NormStage::RSTD1;
const H2: Activation = NormStage::H2;
const RSTD2: Activation = NormStage::RSTD2;

pub(super) fn architecture(
    config: &ModelConfig,
    attention: Attention,
    mut parameters: Parameters,
) -> Architecture {
    let matrix = [config.vocab, config.hidden];
    let mut first = parameters.of_part(Layer::Embedding, "model.");
    let embedding = Embedding::declare(&mut first, "embed_tokens.weight", matrix);
    let block = |layer| {
        let part = Layer::Block(layer);
        let mut own = parameters.of_part(part, format!("model.layers.{layer}."));
        Block::new(config.hidden, stages(config, layer, attention, &mut own))
    };
    let blocks = (0..config.layers).map(block).collect();
    let mut last = parameters.of_part(Layer::Head, "");
    let head = Head {
        norm: Norm::rms(&mut last, "model.norm", config.hidden, config.norm_eps),
        linear: match config.tie_embeddings {
            true => Linear::tied(embedding.tokens(), matrix),
            false => Linear::declare(&mut last, "lm_head", matrix, false),
        },
    };
    let rotary = Rotary {
        head_dim: config.head_dim,
        theta: config.rope_theta,
        scaling: config.rope_scaling.clone(),
    };
    let embedding = Box::new(embedding);
    Architecture::new(Labels::DENSE, parameters, embedding, blocks, head).with_rotary(rotary)
}

/// x2 = x + attention(norm(x)), next x = x2 + feed_forward(norm(x2)).
fn stages(
    config: &ModelConfig,
    layer: usize,
    kind: Attention,
    own: &mut PartParameters,
) -> [Box<dyn Stage>; 8] {
    let ModelConfig {
        hidden,
        ffn,
        heads,
        kv_heads,
        head_dim,
        norm_eps,
        o_bias,
        mlp_bias,
        ..
    } = *config;
    let norm = |own: &mut PartParameters, name, [input, output]: [_; 2], parameter, rstd| {
        Box::new(NormStage {
            name,
            norm: Norm::rms(own, parameter, hidden, norm_eps),
            input,
            output,
            statistics: vec![rstd],
        })
    };
    [
        norm(own, "attn_norm", [X, H1], "input_layernorm", RSTD1),
        Box::new(qkv(config, own)),
        Box::new(CoreAttention {
            kind,
            heads,
            kv_heads,
            head_dim,
            window: config.window(layer),
            dropout: DropoutSite::NONE,
        }),
        Box::new(ResidualProjection {
            name: "attn_out",
            input: CoreAttention::O,
            residual: X,
            output: X2,
            linear: Linear::declare(own, "self_attn.o_proj", [hidden, config.q_width()], o_bias),
            dropout: DropoutSite::NONE,
        }),
        norm(own, "mlp_norm", [X2, H2], "post_attention_layernorm", RSTD2),
        Box::new(Projection {
            name: "mlp_up",
            input: H2,
            output: Swiglu::GATE_UP,
            linear: match config.fused_projections {
                true => Linear::declare(own, "mlp.gate_up_proj", [2 * ffn, hidden], mlp_bias),
                false => Linear::declare_together(
                    own,
                    ["mlp.gate_proj", "mlp.up_proj"].map(|name| (name, ffn)),
                    hidden,
                    mlp_bias,
                ),
            },
        }),
        Box::new(Swiglu { width: ffn }),
        Box::new(ResidualProjection {
            name: "mlp_down",
            input: Swiglu::ACT,
            residual: X2,
            output: Activation::NEXT_X,
            linear: Linear::declare(own, "mlp.down_proj", [hidden, ffn], mlp_bias),
            dropout: DropoutSite::NONE,
        }),
    ]
}

fn qkv(config: &ModelConfig, own: &mut PartParameters) -> Qkv {
    let parts = [
        ("self_attn.q_proj", config.q_width()),
        ("self_attn.k_proj", config.kv_width()),
        ("self_attn.v_proj", config.kv_width()),
    ];
    let linear = match config.fused_projections {
        true => {
            let width = parts.iter().map(|(_, width)| width).sum();
            let shape = [width, config.hidden];
            Linear::declare(own, "self_attn.qkv_proj", shape, config.qkv_bias)
        }
        false => Linear::declare_together(own, parts, config.hidden, config.qkv_bias),
    };
    let norm = |which| {
        let name = format!("self_attn.{which}_norm");
        Norm::rms(own, &name, config.head_dim, config.norm_eps)
    };
    Qkv {
        input: H1,
        linear,
        kv_width: config.kv_width(),
        norms: config.qk_norm.then(|| HeadNorms {
            norms: ["q", "k"].map(norm),
            head_dim: config.head_dim,
        }),
        is_rotary: true,
    }
}
