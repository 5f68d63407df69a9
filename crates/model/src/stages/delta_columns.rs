//! The output of the joined projections of a layer of the gated delta rule, and its columns.

use crate::linear::LinearPart;
use crate::parameters::PartParameters;
use crate::{Activation, DeltaConfig, HeadParts, Label, Linear};
use memory::{In, Out};

/// Widths of what the joined projections write, in the order of its columns.
#[derive(Clone, Copy, Debug)]
pub struct DeltaColumns {
    /// Queries, keys and values, which the convolution mixes.
    pub(super) mixed: usize,
    /// Gates z of the norm.
    pub(super) values: usize,
    /// Logits b, and decays a: one each for every value head.
    pub(super) heads: usize,
}

impl DeltaColumns {
    /// The output of the joined projections: queries, keys and values, z, b and a.
    pub const IN: Activation = Activation::new("gdn_in", "d_gdn_in", Label::QKV);

    pub(super) fn of(delta: &DeltaConfig) -> DeltaColumns {
        DeltaColumns {
            mixed: delta.mixed_width(),
            values: delta.value_width(),
            heads: delta.value_heads,
        }
    }

    /// Declares the projections. They are one product.
    pub(crate) fn declare(own: &mut PartParameters, delta: &DeltaConfig, hidden: usize) -> Linear {
        let DeltaColumns {
            mixed,
            values,
            heads,
        } = DeltaColumns::of(delta);
        let group = heads / delta.key_heads;
        let (keys, group_values) = (delta.key_head_dim, group * delta.value_head_dim);
        let packed = |name, outputs, widths| LinearPart {
            name,
            outputs,
            by_head: Some(HeadParts {
                heads: delta.key_heads,
                widths,
            }),
        };
        let parts: Vec<LinearPart> = match delta.by_key_head {
            true => vec![
                packed(
                    "linear_attn.in_proj_qkvz",
                    mixed + values,
                    [keys, keys, group_values, group_values],
                ),
                packed("linear_attn.in_proj_ba", 2 * heads, [group, group, 0, 0]),
            ],
            false => vec![
                ("linear_attn.in_proj_qkv", mixed).into(),
                ("linear_attn.in_proj_z", values).into(),
                ("linear_attn.in_proj_b", heads).into(),
                ("linear_attn.in_proj_a", heads).into(),
            ],
        };
        Linear::declare_together(own, parts, hidden, false)
    }

    pub(super) fn mixed(self, x: In) -> In {
        x.columns(0..self.mixed)
    }

    pub(super) fn z(self, x: In) -> In {
        x.columns(self.mixed..self.mixed + self.values)
    }

    pub(super) fn b_and_a(self, x: In) -> [In; 2] {
        let first = self.mixed + self.values;
        let of = |number: usize| {
            x.columns(first + number * self.heads..first + (number + 1) * self.heads)
        };
        [of(0), of(1)]
    }

    /// Queries, keys and values, z, b and a, to be written.
    pub(super) fn split(self, x: Out) -> [Out; 4] {
        let (mixed, rest) = x.split_at_column(self.mixed);
        let (z, rest) = rest.split_at_column(self.values);
        let (b, a) = rest.split_at_column(self.heads);
        [mixed, z, b, a]
    }
}
