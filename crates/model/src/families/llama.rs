//! Llama, and the families that differ from it in a few switches: Mistral (sliding windows), Qwen2 (biases of q, k and
//! v), Qwen3 (norms of q and k), Phi-3 (q, k and v are one matrix in files, gate and up another).

use crate::parameters::{Parameters, PartParameters};
use crate::stages::{
    Attention, CoreAttention, Embedding, Head, HeadNorms, MlpActivation, Norm, NormStage,
    Projection, Qkv, ResidualProjection, Rotary,
};
use crate::{
    Activation, ActivationFunction, Architecture, AttentionSpec, Block, BlockSpec, DropoutSite,
    Labels, Linear, ModelConfig, Stage,
};
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
    spec: &BlockSpec,
    kind: Attention,
    own: &mut PartParameters,
) -> [Box<dyn Stage>; 8] {
    let ModelConfig {
        hidden, norm_eps, ..
    } = *config;
    let (attention, feed_forward) = (&spec.attention, &spec.feed_forward);
    let (ffn, mlp_bias) = (feed_forward.width, feed_forward.bias);
    let (o_width, o_bias) = (attention.o_width(), attention.o_bias);
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
        Box::new(qkv(config, attention, own)),
        Box::new(CoreAttention {
            kind,
            attention: attention.clone(),
            dropout: DropoutSite::NONE,
        }),
        Box::new(ResidualProjection {
            name: "attn_out",
            input: CoreAttention::O,
            residual: X,
            output: X2,
            linear: Linear::declare(own, "self_attn.o_proj", [hidden, o_width], o_bias),
            dropout: DropoutSite::NONE,
        }),
        norm(own, "mlp_norm", [X2, H2], "post_attention_layernorm", RSTD2),
        Box::new(Projection {
            name: "mlp_up",
            input: H2,
            output: MlpActivation::GATE_UP,
            linear: match feed_forward.is_fused {
                true => Linear::declare(own, "mlp.gate_up_proj", [2 * ffn, hidden], mlp_bias),
                false => Linear::declare_together(
                    own,
                    ["mlp.gate_proj", "mlp.up_proj"].map(|name| (name, ffn)),
                    hidden,
                    mlp_bias,
                ),
            },
        }),
        Box::new(MlpActivation {
            function: ActivationFunction::Swiglu,
            width: ffn,
        }),
        Box::new(ResidualProjection {
            name: "mlp_down",
            input: MlpActivation::ACT,
            residual: X2,
            output: Activation::NEXT_X,
            linear: Linear::declare(own, "mlp.down_proj", [hidden, ffn], mlp_bias),
            dropout: DropoutSite::NONE,
        }),
    ]
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
    let norm = |which| {
        let name = format!("self_attn.{which}_norm");
        Norm::rms(own, &name, head_dim, config.norm_eps)
    };
    Qkv {
        input: H1,
        linear,
        kv_widths: [k_width, v_width],
        norms: attention.qk_norm.then(|| HeadNorms {
            norms: ["q", "k"].map(norm),
            head_dim,
        }),
        is_rotary: attention.is_rotary,
    }
}
