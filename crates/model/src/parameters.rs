//! The parameters of a model: their Hugging Face names, shapes and places in the arenas.

use crate::ModelConfig;
use memory::{Layout, LayoutBuilder};

/// Where each parameter of a block stands in the layout.
#[derive(Clone, Debug)]
#[allow(
    missing_docs,
    reason = "the fields carry the names that Hugging Face gives the tensors"
)]
pub struct BlockParameters {
    pub input_layernorm: usize,
    pub q_proj: usize,
    pub k_proj: usize,
    pub v_proj: usize,
    pub qkv_bias: Option<[usize; 3]>,
    pub qk_norm: Option<[usize; 2]>,
    pub o_proj: usize,
    pub post_attention_layernorm: usize,
    pub gate_proj: usize,
    pub up_proj: usize,
    pub down_proj: usize,
}

/// Where each parameter stands in the layout.
#[derive(Clone, Debug)]
#[allow(
    missing_docs,
    reason = "the fields carry the names that Hugging Face gives the tensors"
)]
pub struct ParameterIds {
    pub embed_tokens: usize,
    pub blocks: Vec<BlockParameters>,
    pub norm: usize,
    /// The embedding itself where the two are tied.
    pub lm_head: usize,
}

/// The layout of a model's parameters: matrices in forward order, then vectors. `is_precise(name, elements)` says which
/// parameters have states that must not be quantised.
pub fn layout(config: &ModelConfig, is_precise: impl Fn(&str, usize) -> bool) -> Layout {
    let ModelConfig {
        hidden,
        head_dim,
        ffn,
        vocab,
        ..
    } = *config;
    let (q, kv) = (config.q_width(), config.kv_width());
    let mut builder = LayoutBuilder::default();
    builder.add("model.embed_tokens.weight", &[vocab, hidden]);
    for layer in 0..config.layers {
        let mut add = |name: &str, shape: &[usize]| builder.add(block_name(layer, name), shape);
        add("input_layernorm.weight", &[hidden]);
        add("self_attn.q_proj.weight", &[q, hidden]);
        add("self_attn.k_proj.weight", &[kv, hidden]);
        add("self_attn.v_proj.weight", &[kv, hidden]);
        if config.qkv_bias {
            add("self_attn.q_proj.bias", &[q]);
            add("self_attn.k_proj.bias", &[kv]);
            add("self_attn.v_proj.bias", &[kv]);
        }
        if config.qk_norm {
            add("self_attn.q_norm.weight", &[head_dim]);
            add("self_attn.k_norm.weight", &[head_dim]);
        }
        add("self_attn.o_proj.weight", &[hidden, q]);
        add("post_attention_layernorm.weight", &[hidden]);
        add("mlp.gate_proj.weight", &[ffn, hidden]);
        add("mlp.up_proj.weight", &[ffn, hidden]);
        add("mlp.down_proj.weight", &[hidden, ffn]);
    }
    builder.add("model.norm.weight", &[hidden]);
    if !config.tie_embeddings {
        builder.add("lm_head.weight", &[vocab, hidden]);
    }
    builder.build_precise(is_precise)
}

fn block_name(layer: usize, name: &str) -> String {
    format!("model.layers.{layer}.{name}")
}

impl ParameterIds {
    /// Finds the parameters of a model in its layout.
    pub fn new(config: &ModelConfig, layout: &Layout) -> ParameterIds {
        let names = layout
            .entries()
            .iter()
            .enumerate()
            .map(|(index, entry)| (entry.name.as_str(), index));
        let by_name: std::collections::HashMap<&str, usize> = names.collect();
        let find = |name: &str| {
            *by_name
                .get(name)
                .expect("the layout was made from the same configuration")
        };
        let blocks = (0..config.layers).map(|layer| {
            let find = |name: &str| find(&block_name(layer, name));
            BlockParameters {
                input_layernorm: find("input_layernorm.weight"),
                q_proj: find("self_attn.q_proj.weight"),
                k_proj: find("self_attn.k_proj.weight"),
                v_proj: find("self_attn.v_proj.weight"),
                qkv_bias: config
                    .qkv_bias
                    .then(|| ["q", "k", "v"].map(|p| find(&format!("self_attn.{p}_proj.bias")))),
                qk_norm: config
                    .qk_norm
                    .then(|| ["q", "k"].map(|p| find(&format!("self_attn.{p}_norm.weight")))),
                o_proj: find("self_attn.o_proj.weight"),
                post_attention_layernorm: find("post_attention_layernorm.weight"),
                gate_proj: find("mlp.gate_proj.weight"),
                up_proj: find("mlp.up_proj.weight"),
                down_proj: find("mlp.down_proj.weight"),
            }
        });
        let embed_tokens = find("model.embed_tokens.weight");
        let lm_head = if config.tie_embeddings {
            embed_tokens
        } else {
            find("lm_head.weight")
        };
        ParameterIds {
            embed_tokens,
            blocks: blocks.collect(),
            norm: find("model.norm.weight"),
            lm_head,
        }
    }
}
