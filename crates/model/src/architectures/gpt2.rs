//! GPT-2: LayerNorm, learned positions, GELU, biases everywhere, dropout, a tied head.

use crate::parameters::{Parameters, PartParameters};
use crate::stages::{
    Attention, CoreAttention, Embedding, Head, MlpActivation, Norm, NormStage, Projection, Qkv,
    ResidualProjection,
};
use crate::stored::Stored;
use crate::{
    Activation, Architecture, Block, BlockSpec, DropoutSite, Fp8Layer, Labels, Linear, ModelConfig,
    SharingRanks, Stage,
};
use memory::Layer;
use std::rc::Rc;

const X: Activation = Activation::X;
const H1: Activation = NormStage::H1;
const MEAN1: Activation = NormStage::MEAN1;
const RSTD1: Activation = NormStage::RSTD1;
const X2: Activation = ResidualProjection::X2;
const H2: Activation = NormStage::H2;
const MEAN2: Activation = NormStage::MEAN2;
const RSTD2: Activation = NormStage::RSTD2;

pub(super) fn architecture(
    config: &ModelConfig,
    blocks: &[Rc<BlockSpec>],
    attention: Attention,
    mut parameters: Parameters,
) -> Architecture {
    let hidden = config.hidden;
    let [at_embedding, ..] = dropouts(config);
    let mut first = parameters.of_part(Layer::Embedding, "transformer.");
    let tokens = Embedding::declare(&mut first, "wte.weight", [config.vocab, hidden]);
    let linear = Linear::tied(tokens.tokens, [config.vocab, hidden]);
    let positions = config.max_positions.unwrap_or(0);
    let embedding = tokens.with_positions(&mut first, "wpe.weight", positions, at_embedding);
    let block = |(layer, spec): (usize, &Rc<BlockSpec>)| {
        let prefix = format!("transformer.h.{layer}.");
        let own = parameters.of_part(Layer::Block(layer), prefix);
        // Hugging Face keeps these matrices as `Conv1D`: inputs by outputs.
        let mut own = own.stored(Stored::Transposed);
        Block::new(hidden, stages(config, spec, attention, &mut own))
    };
    let blocks = blocks.iter().enumerate().map(block).collect();
    let mut last = parameters.of_part(Layer::Head, "transformer.");
    let norm = Norm::layer(&mut last, "ln_f", hidden, config.norm_eps);
    let head = Head {
        norm,
        linear,
        logit_multiplier: 1.0,
        cap: None,
    };
    let embedding = Box::new(embedding);
    let labels = parameters.labels(Labels::DENSE);
    Architecture::new(labels, parameters, embedding, blocks, head)
}

/// x2 = x + dropout(attention(norm(x))), next x = x2 + dropout(feed_forward(norm(x2))).
fn stages(
    config: &ModelConfig,
    spec: &BlockSpec,
    kind: Attention,
    own: &mut PartParameters,
) -> [Box<dyn Stage>; 8] {
    let (hidden, ffn) = (config.hidden, spec.feed_forward.width);
    let attention = &spec.attention;
    let [_, of_probs, of_attention, of_feed_forward] = dropouts(config);
    let norm =
        |own: &mut PartParameters, name, [input, output]: [_; 2], parameter, statistics: [_; 2]| {
            NormStage {
                name,
                norm: Norm::layer(own, parameter, hidden, config.norm_eps),
                input,
                output,
                statistics: statistics.into(),
            }
        };
    let mut attn_norm = norm(own, "attn_norm", [X, H1], "ln_1", [MEAN1, RSTD1]);
    let qkv = qkv(config, own);
    attn_norm.norm.read_by = qkv.linear.fp8_reader();
    let attn_out = Linear::declare(own, "attn.c_proj", [hidden, hidden], true);
    let attn_out = attn_out.in_fp8(own, Fp8Layer::AttnOut);
    let mut mlp_norm = norm(own, "mlp_norm", [X2, H2], "ln_2", [MEAN2, RSTD2]);
    let up = Linear::declare(own, "mlp.c_fc", [ffn, hidden], true);
    let up = up.in_fp8(own, Fp8Layer::MlpUp);
    mlp_norm.norm.read_by = up.fp8_reader();
    let made_by = up.fp8_layer();
    let down = Linear::declare(own, "mlp.c_proj", [hidden, ffn], true);
    let down = down.in_fp8(own, Fp8Layer::MlpDown);
    [
        Box::new(attn_norm),
        Box::new(qkv),
        Box::new(CoreAttention {
            kind,
            attention: attention.clone(),
            sinks: None,
            dropout: of_probs,
            latents: None,
            ranks: SharingRanks::ALONE,
        }),
        Box::new(ResidualProjection {
            name: "attn_out",
            input: CoreAttention::O,
            residual: X,
            output: X2,
            linear: attn_out,
            multiplier: 1.0,
            dropout: of_attention,
        }),
        Box::new(mlp_norm),
        Box::new(Projection {
            name: "mlp_up",
            in_f32: false,
            input: H2,
            output: MlpActivation::FC,
            linear: up,
        }),
        Box::new(MlpActivation {
            gate: None,
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
            multiplier: 1.0,
            dropout: of_feed_forward,
        }),
    ]
}

/// One matrix projects the input to queries, keys and values.
fn qkv(config: &ModelConfig, own: &mut PartParameters) -> Qkv {
    let hidden = config.hidden;
    Qkv {
        input: H1,
        linear: Linear::declare(own, "attn.c_attn", [3 * hidden, hidden], true)
            .in_fp8(own, Fp8Layer::Qkv),
        kv_widths: [hidden; 2],
        head_dim: config.head_dim,
        norms: None,
        rotary: None,
        has_gate: false,
    }
}

/// The sites of dropout: the embedding, attention's probabilities, and what attention and the feed-forward layer add to
/// the residual stream.
fn dropouts(config: &ModelConfig) -> [DropoutSite; 4] {
    let rate = config.dropout as f32;
    [0, 1, 2, 3].map(|site| DropoutSite { site, rate })
}
