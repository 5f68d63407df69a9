//! Blocks of RMSNorm, attention and SwiGLU or experts, as all families but GPT-2 have them. What layers and families differ in
//! stands in a [`BlockSpec`]; parameters have transformers' names.

use super::experts;
use crate::fp8::Fp8Reader;
use crate::hugging_face::ExpertNames;
use crate::parameters::{Initial, Parameters, PartParameters};
use crate::stages::{
    Attention, AttentionGate, CoreAttention, Delta, DeltaColumns, DeltaNorm, Embedding, Head,
    HeadNorms, LatentDown, LatentHeads, LatentUp, MlpActivation, Norm, NormBehind, NormStage,
    Projection, Qkv, ResidualProjection,
};
use crate::{
    Activation, Architecture, AttentionSpec, Block, BlockSpec, DeltaConfig, DropoutSite, Fp8Layer,
    LatentConfig, Linear, ModelConfig, NormPlacement, QkNormExtent, SharingRanks, Stage,
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
    let embedding = embedding
        .multiplied(config.embedding_multiplier as f32)
        .scaled(config.scale_embedding);
    let expert_names = experts::names(config);
    let block = |(layer, spec): (usize, &Rc<BlockSpec>)| {
        let part = Layer::Block(layer);
        let mut own = parameters.of_part(part, format!("model.layers.{layer}."));
        let builder = Builder {
            config,
            spec,
            kind: attention,
            expert_names,
        };
        Block::new(config.hidden, builder.stages(&mut own))
    };
    let layers = blocks.iter().enumerate().map(block).collect();
    let mut last = parameters.of_part(Layer::Head, "");
    let head = Head {
        norm: norm(config, &mut last, "model.norm", config.hidden),
        linear: match config.tie_embeddings {
            true => Linear::tied(embedding.tokens, matrix),
            false => Linear::declare(&mut last, "lm_head", matrix, false),
        },
        logit_multiplier: config.logits_scaling.recip() as f32,
        cap: config.final_logit_softcapping.map(|cap| cap as f32),
    };
    let with_attention = blocks.iter().filter(|spec| spec.delta.is_none());
    let rotary = with_attention.filter_map(|spec| spec.attention.rotary.clone());
    let embedding = Box::new(embedding);
    let labels = parameters.labels(config.labels());
    Architecture::new(labels, parameters, embedding, layers, head)
        .with_rotary(rotary)
        .with_router_losses(config.router_losses())
}

/// A norm of the residual stream, of queries or of keys, with the model's form of weight.
fn norm(config: &ModelConfig, own: &mut PartParameters, name: &str, width: usize) -> Norm {
    match config.zero_centered_norm {
        true => Norm::zero_centered_rms(own, name, width, config.norm_eps),
        false => Norm::rms(own, name, width, config.norm_eps),
    }
}

/// Makes the stages of a block.
struct Builder<'a> {
    config: &'a ModelConfig,
    spec: &'a BlockSpec,
    kind: Attention,
    expert_names: ExpertNames,
}

/// A part of a block that adds to the residual stream: attention, or the feed-forward layer.
struct Sublayer {
    /// The residual stream before it.
    residual: Activation,
    /// The residual stream after it.
    output: Activation,
    /// The name in reports of its norm, or of the one in front.
    norm: &'static str,
    /// The name in reports of a norm behind, where another stands in front.
    second_norm: &'static str,
    /// The name in files of a norm in front, and of one that has another behind.
    norm_in_front: [&'static str; 2],
    /// The name in files of a norm behind.
    norm_behind: &'static str,
    /// Output of the norm in front.
    normed: Activation,
    /// The statistic of its norm, or of the one in front.
    rstd: Activation,
    /// The statistic of a norm behind, where another stands in front.
    second_rstd: Activation,
    /// The name of its last product.
    product: &'static str,
    /// Input of the last product.
    made: Activation,
    /// Output of the last product, if a norm follows it.
    projected: Activation,
}

const ATTENTION: Sublayer = Sublayer {
    residual: X,
    output: X2,
    norm: "attn_norm",
    second_norm: "attn_post_norm",
    norm_in_front: ["input_layernorm"; 2],
    norm_behind: "post_attention_layernorm",
    normed: H1,
    rstd: RSTD1,
    second_rstd: NormBehind::RSTD_ATTN,
    product: "attn_out",
    made: CoreAttention::O,
    projected: NormBehind::ATTN,
};

/// The same where a gate stands in front of the last product.
const BEHIND_GATE: Sublayer = Sublayer {
    made: AttentionGate::OUT,
    ..ATTENTION
};

const FEED_FORWARD: Sublayer = Sublayer {
    residual: X2,
    output: Activation::NEXT_X,
    norm: "mlp_norm",
    second_norm: "mlp_post_norm",
    norm_in_front: ["post_attention_layernorm", "pre_feedforward_layernorm"],
    norm_behind: "post_feedforward_layernorm",
    normed: H2,
    rstd: RSTD2,
    second_rstd: NormBehind::RSTD_MLP,
    product: "mlp_down",
    made: MlpActivation::ACT,
    projected: NormBehind::MLP,
};

impl Builder<'_> {
    /// x2 = x + attention(norm(x)), next x = x2 + feed_forward(norm(x2)); with norms behind, x2 = x + norm(attention(x)), and with both
    /// x2 = x + norm(attention(norm(x))).
    fn stages(&self, own: &mut PartParameters) -> Vec<Box<dyn Stage>> {
        let mut stages = match &self.spec.delta {
            Some(delta) => self.delta(delta, own),
            None => self.attention(own),
        };
        match &self.spec.experts {
            None => stages.extend(self.dense(own)),
            Some(spec) => {
                let norm = self.norm_in_front(&FEED_FORWARD, own);
                stages.extend(boxed(norm, None));
                let names = self.expert_names;
                let gate = self.spec.gate.expect("experts have a gate");
                stages.extend(experts::stages(
                    self.config.hidden,
                    (spec, gate),
                    names,
                    own,
                ));
            }
        }
        stages
    }

    /// Input of a sublayer's first products.
    fn input(&self, of: &Sublayer) -> Activation {
        match self.spec.norms.is_in_front() {
            true => of.normed,
            false => of.residual,
        }
    }

    /// The norm in front of a sublayer, if it stands there.
    fn norm_in_front(&self, of: &Sublayer, own: &mut PartParameters) -> Option<NormStage> {
        let norms = self.spec.norms;
        let name = of.norm_in_front[usize::from(norms.is_behind())];
        norms.is_in_front().then(|| NormStage {
            name: of.norm,
            norm: norm(self.config, own, name, self.config.hidden),
            input: of.residual,
            output: of.normed,
            statistics: vec![of.rstd],
        })
    }

    /// A sublayer's last product, added to the residual stream, behind a norm if it stands there.
    fn added(
        &self,
        of: &Sublayer,
        linear: Linear,
        own: &mut PartParameters,
    ) -> Vec<Box<dyn Stage>> {
        let (residual, output, config) = (of.residual, of.output, self.config);
        let (name, rstd) = match self.spec.norms {
            NormPlacement::Before => {
                return vec![Box::new(ResidualProjection {
                    name: of.product,
                    input: of.made,
                    residual,
                    output,
                    linear,
                    multiplier: self.spec.residual_multiplier,
                    dropout: DropoutSite::NONE,
                })];
            }
            NormPlacement::After => (of.norm, of.rstd),
            NormPlacement::Both => (of.second_norm, of.second_rstd),
        };
        vec![
            Box::new(Projection {
                name: of.product,
                input: of.made,
                output: of.projected,
                linear,
                in_f32: false,
            }),
            Box::new(NormBehind {
                name,
                norm: norm(config, own, of.norm_behind, config.hidden),
                input: of.projected,
                residual,
                output,
                rstd,
            }),
        ]
    }

    fn attention(&self, own: &mut PartParameters) -> Vec<Box<dyn Stage>> {
        let (hidden, attention) = (self.config.hidden, &self.spec.attention);
        let norm = self.norm_in_front(&ATTENTION, own);
        let mut stages: Vec<Box<dyn Stage>> = Vec::new();
        let latents = match &attention.latent {
            None => {
                let qkv = self.qkv(own);
                stages.extend(boxed(norm, qkv.linear.fp8_reader()));
                stages.push(Box::new(qkv));
                None
            }
            Some(latent) => {
                stages.extend(boxed(norm, None));
                let (made, heads) = latents(hidden, attention, latent, own);
                stages.extend(made);
                Some(heads)
            }
        };
        stages.push(Box::new(CoreAttention {
            kind: self.kind,
            attention: attention.clone(),
            sinks: attention
                .has_sinks
                .then(|| own.vector("self_attn.sinks", attention.heads, Initial::Normal)),
            dropout: DropoutSite::NONE,
            latents,
            ranks: SharingRanks::ALONE,
        }));
        let width = attention.o_width();
        let linear = Linear::declare(own, "self_attn.o_proj", [hidden, width], attention.o_bias);
        let linear = linear.in_fp8(own, Fp8Layer::AttnOut);
        let sublayer = match attention.has_gate {
            true => {
                stages.push(Box::new(AttentionGate { width }));
                &BEHIND_GATE
            }
            false => &ATTENTION,
        };
        stages.extend(self.added(sublayer, linear, own));
        stages
    }

    /// out(norm(rule(convolution(in))) silu(z)).
    fn delta(&self, delta: &DeltaConfig, own: &mut PartParameters) -> Vec<Box<dyn Stage>> {
        let hidden = self.config.hidden;
        let norm = self.norm_in_front(&ATTENTION, own);
        let projections = DeltaColumns::declare(own, delta, hidden).in_fp8(own, Fp8Layer::Qkv);
        let mut stages: Vec<Box<dyn Stage>> = Vec::new();
        stages.extend(boxed(norm, projections.fp8_reader()));
        stages.push(Box::new(Projection {
            name: "gdn_in",
            input: self.input(&ATTENTION),
            output: DeltaColumns::IN,
            linear: projections,
            in_f32: false,
        }));
        stages.push(Box::new(Delta::declare(own, delta)));
        stages.push(Box::new(DeltaNorm::declare(
            own,
            delta,
            self.config.norm_eps,
        )));
        let shape = [hidden, delta.value_width()];
        let linear = Linear::declare(own, "linear_attn.out_proj", shape, false);
        let linear = linear.in_fp8(own, Fp8Layer::AttnOut);
        stages.extend(self.added(&BEHIND_GATE, linear, own));
        stages
    }

    /// down(function(gate) up).
    fn dense(&self, own: &mut PartParameters) -> Vec<Box<dyn Stage>> {
        let (spec, hidden) = (&self.spec.feed_forward, self.config.hidden);
        let norm = self.norm_in_front(&FEED_FORWARD, own);
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
        let mut stages: Vec<Box<dyn Stage>> = Vec::new();
        stages.extend(boxed(norm, up.fp8_reader()));
        stages.push(Box::new(Projection {
            name: "mlp_up",
            input: self.input(&FEED_FORWARD),
            output: MlpActivation::GATE_UP,
            linear: up,
            in_f32: false,
        }));
        stages.push(Box::new(MlpActivation {
            gate: self.spec.gate,
            width: ffn,
            read_by: down.fp8_reader(),
            made_by,
        }));
        stages.extend(self.added(&FEED_FORWARD, down, own));
        stages
    }

    /// Queries, keys and values.
    fn qkv(&self, own: &mut PartParameters) -> Qkv {
        let (config, attention) = (self.config, &self.spec.attention);
        let (head_dim, has_bias) = (attention.qk_head_dim, attention.qkv_bias);
        let [k_width, v_width] = attention.kv_widths();
        let parts = [
            ("self_attn.q_proj", attention.q_outputs()),
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
        let norms = attention.qk_norm.map(|extent| {
            let widths = match extent {
                QkNormExtent::Head => [head_dim; 2],
                QkNormExtent::All => [attention.q_width(), k_width],
            };
            let mut of = |which, width| {
                let name = format!("self_attn.{which}_norm");
                norm(config, own, &name, width)
            };
            HeadNorms {
                norms: [of("q", widths[0]), of("k", widths[1])],
                widths,
            }
        });
        Qkv {
            input: self.input(&ATTENTION),
            linear,
            kv_widths: [k_width, v_width],
            head_dim,
            norms,
            rotary: attention.rotary.clone(),
            has_gate: attention.has_gate,
        }
    }
}

/// A norm in front, if there is one, as a stage; `read_by` is the only layer that reads it.
fn boxed(norm: Option<NormStage>, read_by: Option<Fp8Reader>) -> Option<Box<dyn Stage>> {
    norm.map(|mut norm| {
        norm.norm.read_by = read_by;
        Box::new(norm) as Box<dyn Stage>
    })
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

/// The norms of latents have this epsilon, whatever the model's others have.
const LATENT_EPS: f64 = 1e-6;

/// Latents, their norms, and queries, keys and values from them; and the matrix of keys and values.
fn latents(
    hidden: usize,
    attention: &AttentionSpec,
    latent: &LatentConfig,
    own: &mut PartParameters,
) -> (Vec<Box<dyn Stage>>, LatentHeads) {
    let mut stages: Vec<Box<dyn Stage>> = vec![Box::new(LatentDown::declare(
        own,
        (hidden, H1),
        attention,
        latent,
    ))];
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
