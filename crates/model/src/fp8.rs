//! Products in FP8: those of the blocks' dense layers, forward and for both gradients.
//!
//! Each operand becomes codes of eight bits with one scale, which follows from its own largest magnitude
//! ([`kernels::fp8`]). A GPU multiplies codes only where both operands have the summed axis innermost, so weights are
//! transposed for the input's gradient, and input and output's gradient for the weight's. What products alone read can be
//! kept as codes between the passes.

use crate::NamePatterns;
use kernels::fp8::Fp8;
use memory::{Buffer, Out};

pub(crate) const TOGETHER: &str = "matrices that lie together are one";

/// Which products of a model are computed in FP8, and how.
#[derive(Clone, Debug)]
pub struct Fp8Products {
    /// The format of gradients; all else is e4m3.
    pub gradients: Fp8,
    /// Patterns of the names of matrices whose products are not.
    pub except: NamePatterns,
    /// Whether activations that these products alone read are kept as codes.
    pub saves_codes: bool,
    /// Whether the codes of weights are kept for the step, or made at each use.
    pub keeps_weights: bool,
    /// Whether tensor cores may keep sums of forward products in fewer bits than f32 has.
    pub fast_accumulation: bool,
}

/// A layer of a block whose products are computed in FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Layer {
    /// Queries, keys and values.
    Qkv,
    /// The output of attention.
    AttnOut,
    /// The first of the feed-forward layer, or gate and up.
    MlpUp,
    /// The last of the feed-forward layer.
    MlpDown,
}

impl Fp8Layer {
    /// In the order of a forward pass.
    pub const ALL: [Fp8Layer; 4] = [
        Fp8Layer::Qkv,
        Fp8Layer::AttnOut,
        Fp8Layer::MlpUp,
        Fp8Layer::MlpDown,
    ];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Fp8Layer::Qkv => "qkv",
            Fp8Layer::AttnOut => "attn_out",
            Fp8Layer::MlpUp => "mlp_up",
            Fp8Layer::MlpDown => "mlp_down",
        }
    }
}

/// The layer in FP8 that alone reads an activation.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Reader {
    /// Which layer.
    pub layer: Fp8Layer,
    /// Whether the activation is kept as codes.
    pub as_codes: bool,
}

/// An operand of a layer's three products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Operand {
    /// Its input.
    Input,
    /// Its matrices, as one.
    Weight,
    /// The gradient of its output.
    Gradient,
}

impl Fp8Operand {
    /// All of them.
    pub const ALL: [Fp8Operand; 3] = [Fp8Operand::Input, Fp8Operand::Weight, Fp8Operand::Gradient];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Fp8Operand::Input => "input",
            Fp8Operand::Weight => "weight",
            Fp8Operand::Gradient => "gradient",
        }
    }
}

/// An operand of a product in FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Site {
    /// The block.
    pub block: usize,
    /// Its layer.
    pub layer: Fp8Layer,
    /// Which operand of that layer.
    pub operand: Fp8Operand,
}

impl Fp8Site {
    /// Sites of a block.
    pub(crate) const OF_BLOCK: usize = Fp8Layer::ALL.len() * Fp8Operand::ALL.len();

    /// All sites from the first block on, without end.
    pub(crate) fn all() -> impl Iterator<Item = Fp8Site> {
        let layers = (0..).flat_map(|block| Fp8Layer::ALL.map(|layer| (block, layer)));
        layers.flat_map(|(block, layer)| {
            Fp8Operand::ALL.map(|operand| Fp8Site {
                block,
                layer,
                operand,
            })
        })
    }

    /// Its number among all.
    pub(crate) fn number(self) -> usize {
        let layer = self.block * Fp8Layer::ALL.len() + self.layer as usize;
        layer * Fp8Operand::ALL.len() + self.operand as usize
    }
}

/// An output of a stage, which is kept in the compute type or as codes. `wide`: where the stage writes values that become codes
/// afterwards; it writes what is kept without.
pub(crate) struct CodedOutput {
    pub(crate) kept: Buffer,
    pub(crate) wide: Option<Buffer>,
}

impl CodedOutput {
    /// Where the stage writes.
    pub(crate) fn view_mut(&mut self) -> Out<'_> {
        self.wide.as_mut().unwrap_or(&mut self.kept).view_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files of weights in FP8 are read by another decoder of e4m3: both give the same values.
    #[test]
    fn codes_in_files_have_the_same_values() {
        let codes: Vec<u8> = (0..=255).collect();
        let mut values = Vec::new();
        files::widen(files::Dtype::F8_E4M3, &codes, &mut values);
        for (code, value) in codes.into_iter().zip(values) {
            let expected = Fp8::E4m3.value(code);
            assert!(
                value == expected || value.is_nan() && expected.is_nan(),
                "{code:#x}"
            );
        }
    }
}
