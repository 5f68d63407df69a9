//! What a model's configuration says of each block. A family makes stages from it.

use crate::stages::{Rotary, Temperature};
use crate::{
    ActivationFunction, CacheWidths, DeltaConfig, ExpertsConfig, LatentConfig, ModelConfig,
    NormPlacement, QkNormExtent, RopeScaling,
};
use kernels::operation::GateFunction;
use kernels::{AttentionShape, Positive};
use std::rc::Rc;

/// The parts of a block. Blocks of one model may differ in everything but the width of the residual stream.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockSpec {
    /// Its attention, where it has no delta rule.
    pub attention: AttentionSpec,
    /// Its gated delta rule, in place of attention.
    pub delta: Option<DeltaConfig>,
    /// Its feed-forward layer, where it has no experts.
    pub feed_forward: FeedForwardSpec,
    /// The function of gate and up, in that layer and in experts; none: that layer has no gate, and GELU.
    pub gate: Option<GateFunction>,
    /// Its experts, in place of that layer.
    pub experts: Option<ExpertsConfig>,
    /// Where its norms stand.
    pub norms: NormPlacement,
    /// Factor on its outputs, before they are added to the residual stream.
    pub residual_multiplier: f32,
}

/// The shape and the features of attention.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Query heads.
    pub heads: usize,
    /// Key-value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head of queries, and of one of keys.
    pub qk_head_dim: usize,
    /// Width of a head of values, and of one of the output.
    pub v_head_dim: usize,
    /// Attention scores are multiplied by it; `None` means 1 / sqrt(`qk_head_dim`).
    pub scale: Option<f32>,
    /// Scores s become c tanh(s / c), with this c; none: they stay.
    pub cap: Option<f32>,
    /// Every head has a learned score that joins its softmax and has no value.
    pub has_sinks: bool,
    /// Its output is multiplied by the sigmoid of a gate, whose columns stand beside those of each head of queries.
    pub has_gate: bool,
    /// The most keys that a query sees, its own included; none: its own and all before it.
    pub window: Option<usize>,
    /// Extent of the norms of queries and keys; none if they have no norms.
    pub qk_norm: Option<QkNormExtent>,
    /// The rotary embedding that turns queries and keys; none: they have no positions.
    pub rotary: Option<Rotary>,
    /// The projections of queries, keys and values have a bias.
    pub qkv_bias: bool,
    /// The output projection has a bias.
    pub o_bias: bool,
    /// Queries, keys and values are one matrix in files.
    pub is_fused: bool,
    /// Queries, keys and values come from latents.
    pub latent: Option<LatentConfig>,
}

/// The shape and the features of a feed-forward layer.
#[derive(Clone, Debug, PartialEq)]
pub struct FeedForwardSpec {
    /// Its width.
    pub width: usize,
    /// Its projections have a bias.
    pub bias: bool,
    /// Gate and up are one matrix in files.
    pub is_fused: bool,
}

impl AttentionSpec {
    /// Width of all query heads together.
    pub fn q_width(&self) -> usize {
        self.heads * self.qk_head_dim
    }

    /// Outputs of the projection of queries, which also makes their gates.
    pub fn q_outputs(&self) -> usize {
        self.q_width() * (1 + usize::from(self.has_gate))
    }

    /// Width of all key heads together, and of all value heads.
    pub fn kv_widths(&self) -> [usize; 2] {
        [self.qk_head_dim, self.v_head_dim].map(|head_dim| self.kv_heads * head_dim)
    }

    /// Widths of all heads together, of queries, keys and values.
    pub fn qkv_widths(&self) -> [usize; 3] {
        let [k_width, v_width] = self.kv_widths();
        [self.q_width(), k_width, v_width]
    }

    /// Width of the output of all heads together.
    pub fn o_width(&self) -> usize {
        self.heads * self.v_head_dim
    }

    /// What a cache keeps of a token: keys and values, or its latent, beside the columns of keys that all heads share.
    pub fn cache_widths(&self) -> CacheWidths {
        let [keys, values] = self.cached().kv_widths();
        CacheWidths {
            keys,
            values: self.latent.is_none().then_some(values),
        }
    }

    /// What passes with a cache compute. Latent attention has its absorbed form there (DeepSeek-V2, 2024): one head of
    /// keys, which are the latents beside the shared columns, and whose values are the latents; scores are the same.
    pub fn cached(&self) -> AttentionSpec {
        let Some(latent) = &self.latent else {
            return self.clone();
        };
        AttentionSpec {
            kv_heads: 1,
            qk_head_dim: latent.kv + latent.rotary_dim,
            v_head_dim: latent.kv,
            scale: Some(self.shape(1, 1).scale()),
            ..self.clone()
        }
    }

    /// Its shape for `batch` sequences of `seq` tokens.
    pub fn shape(&self, batch: usize, seq: usize) -> AttentionShape {
        AttentionShape {
            v_head_dim: self.v_head_dim,
            window: self.window,
            scale: self.scale.map(Positive::new),
            cap: self.cap.map(Positive::new),
            ..AttentionShape::new([batch, seq], [self.heads, self.kv_heads], self.qk_head_dim)
        }
    }
}

impl ModelConfig {
    /// The specification of each block; equal blocks share one.
    pub fn blocks(&self) -> Vec<Rc<BlockSpec>> {
        let mut distinct: Vec<(_, Rc<BlockSpec>)> = Vec::new();
        let of_layer = |layer| {
            let kind = (
                self.window(layer),
                self.turns(layer),
                self.has_experts(layer),
                self.has_delta(layer),
            );
            let known = distinct.iter().find(|(other, _)| *other == kind);
            known.map(|(_, spec)| spec.clone()).unwrap_or_else(|| {
                let spec = Rc::new(self.block(layer));
                distinct.push((kind, spec.clone()));
                spec
            })
        };
        (0..self.layers).map(of_layer).collect()
    }

    /// Whether a layer has experts.
    pub fn has_experts(&self, layer: usize) -> bool {
        let experts = self.experts.as_ref();
        experts.is_some_and(|experts| experts.are_in(layer))
    }

    /// The specification of a layer's block.
    pub fn block(&self, layer: usize) -> BlockSpec {
        BlockSpec {
            attention: self.attention(layer),
            delta: self.delta.clone().filter(|_| self.has_delta(layer)),
            feed_forward: FeedForwardSpec {
                width: self.ffn,
                bias: self.mlp_bias || self.biases,
                is_fused: self.fused_projections,
            },
            gate: self.gate(),
            experts: self.experts.clone().filter(|_| self.has_experts(layer)),
            norms: self.norm_placement,
            residual_multiplier: self.residual_multiplier as f32,
        }
    }

    /// The function of gate and up, if the feed-forward layer has a gate.
    fn gate(&self) -> Option<GateFunction> {
        match self.activation {
            ActivationFunction::Swiglu => Some(GateFunction::Silu),
            ActivationFunction::GegluTanh => Some(GateFunction::GeluTanh),
            ActivationFunction::ClampedSwiglu => Some(GateFunction::ClampedSwish {
                alpha: self.swiglu_alpha as f32,
                limit: self.swiglu_limit as f32,
            }),
            ActivationFunction::GeluTanh => None,
        }
    }

    /// The rotary embedding of a layer, if it has one.
    fn rotary(&self, layer: usize) -> Option<Rotary> {
        let of_window = self
            .window_rope_theta
            .filter(|_| self.window(layer).is_some());
        let original = || self.rope_scaling.as_ref()?.original_max_position();
        self.turns(layer).then(|| Rotary {
            columns: self.rotary_dim(),
            theta: of_window.unwrap_or(self.rope_theta),
            scaling: self.rope_scaling.clone().filter(|_| of_window.is_none()),
            temperature: self
                .query_temperature
                .zip(original())
                .map(|(beta, original)| Temperature { beta, original }),
        })
    }

    /// The attention of a layer.
    pub fn attention(&self, layer: usize) -> AttentionSpec {
        let latent = self.latent.as_ref();
        let factor = self
            .rope_scaling
            .as_ref()
            .map_or(1.0, RopeScaling::score_factor);
        let scale = (self.head_dim as f64).sqrt().recip() * factor;
        AttentionSpec {
            heads: self.heads,
            kv_heads: self.kv_heads,
            qk_head_dim: self.head_dim,
            v_head_dim: latent.map_or(self.head_dim, |latent| latent.v_head_dim),
            scale: match self.attention_multiplier {
                Some(scale) => Some(scale as f32),
                None => (latent.is_some() && factor != 1.0).then_some(scale as f32),
            },
            cap: self.attn_logit_softcapping.map(|cap| cap as f32),
            has_sinks: self.attention_sinks,
            has_gate: self.attention_gate,
            window: self.window(layer),
            qk_norm: self.qk_norm.then_some(self.qk_norm_over),
            rotary: self.rotary(layer),
            qkv_bias: self.qkv_bias || self.biases,
            o_bias: self.o_bias || self.biases,
            is_fused: self.fused_projections,
            latent: self.latent.clone(),
        }
    }
}
