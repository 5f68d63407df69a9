//! The shape of layers with the gated delta rule, as a configuration gives it.

use kernels::operation::DeltaShape;
use serde::{Deserialize, Serialize};

/// The gated delta rule in place of attention in some layers (Qwen3-Next): a short causal convolution, then a state for each head that
/// every token changes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeltaConfig {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Width of a head of queries, and of one of keys.
    pub key_head_dim: usize,
    /// Width of a head of values.
    pub value_head_dim: usize,
    /// Tokens that the convolution sees, the token itself included.
    #[serde(default = "conv_width")]
    pub conv_width: usize,
    /// Layers with attention, counted from 0 and in order.
    #[serde(default)]
    pub attention_layers: Vec<usize>,
    /// Files have the projections of queries, keys, values and gates as one matrix, by key head (Qwen3-Next).
    #[serde(default)]
    pub by_key_head: bool,
}

/// The width in published models.
fn conv_width() -> usize {
    4
}

impl DeltaConfig {
    /// Widths of all heads of queries, keys, and values, side by side.
    pub fn qkv_widths(&self) -> [usize; 3] {
        let keys = self.key_heads * self.key_head_dim;
        [keys, keys, self.value_width()]
    }

    /// Width of all heads of values together, and of the gate of each.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_head_dim
    }

    /// Columns that the convolution reads: queries, keys and values.
    pub fn mixed_width(&self) -> usize {
        self.qkv_widths().iter().sum()
    }

    /// Outputs of all projections but the last: what the convolution reads, and a gate and two numbers of each value head.
    pub fn projected_width(&self) -> usize {
        self.mixed_width() + self.value_width() + 2 * self.value_heads
    }

    /// Its shape for `batch` sequences of `seq` tokens, of whose states every `state_interval`-th is kept.
    pub fn shape(&self, batch: usize, seq: usize, state_interval: usize) -> DeltaShape {
        DeltaShape {
            batch,
            seq,
            key_heads: self.key_heads,
            value_heads: self.value_heads,
            key_dim: self.key_head_dim,
            value_dim: self.value_head_dim,
            state_interval,
        }
    }

    /// Refuses sizes that make no layer, and layers that do not exist.
    pub(crate) fn check(&self, layers: usize) -> Result<(), String> {
        const ANY: usize = usize::MAX;
        let sizes = [
            ("key_heads", self.key_heads, 1..=ANY),
            ("value_heads", self.value_heads, 1..=ANY),
            (
                "key_head_dim",
                self.key_head_dim,
                1..=DeltaShape::KEY_DIM_MAX,
            ),
            ("value_head_dim", self.value_head_dim, 1..=ANY),
            ("conv_width", self.conv_width, 2..=DeltaShape::TAPS_MAX),
        ];
        for (name, size, range) in sizes {
            if !range.contains(&size) {
                let [least, most] = [range.start(), range.end()];
                let most = if *most == ANY {
                    "".into()
                } else {
                    format!(" to {most}")
                };
                return Err(format!("{name} = {size}; it must be from {least}{most}"));
            }
        }
        if !self.value_heads.is_multiple_of(self.key_heads) {
            return Err(format!(
                "value_heads = {}; it must be a multiple of key_heads = {}",
                self.value_heads, self.key_heads
            ));
        }
        let listed = &self.attention_layers;
        match listed.is_sorted_by(|one, next| one < next)
            && listed.last().is_none_or(|last| *last < layers)
        {
            true if listed.len() < layers => Ok(()),
            true => Err(
                "attention_layers leave no layer to the gated delta rule; leave model.delta out"
                    .into(),
            ),
            false => Err(format!(
                "attention_layers = {listed:?}; write each of the {layers} layers, counted from 0, at most once and in order"
            )),
        }
    }
}
