//! Products in FP8: those of the blocks' dense layers, forward and for both gradients.
//!
//! Each operand becomes codes of eight bits with one scale, which follows from its own largest magnitude
//! ([`kernels::fp8`]). A GPU multiplies codes only where both operands have the summed axis innermost, so weights are
//! transposed for the input's gradient, and input and output's gradient for the weight's. What products alone read can be
//! kept as codes between the passes.

use crate::{ModelError, NamePatterns};
use kernels::Kernels;
use kernels::fp8::Fp8;
use kernels::operation::{AbsMax, Quantise};
use memory::{Buffer, Category, DType, In, Memory, Out, OutOfMemory};

pub(crate) const LEASED: &str = "a model with products in FP8 has cells for their scales";
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

/// What such a layer multiplies. An activation keeps its cells until the backward pass, the others while they are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Multiplied {
    Input,
    Weight,
    Gradient,
}

const LAYERS: usize = 4;
const OPERANDS: usize = 3;
/// Cells of an operand: its scale, its largest magnitude, and two that are not used, because cuBLASLt takes scales at multiples of
/// 16 bytes.
const CELLS: usize = 4;

/// The matrices of a layer of a block, as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fp8Weight {
    pub(crate) block: usize,
    pub(crate) layer: Fp8Layer,
    /// Outputs and inputs.
    pub(crate) shape: [usize; 2],
}

/// The scale and the largest magnitude of each operand of each layer of each block. A replay finds in its cells what the
/// forward pass has written there, and writes the same.
pub(crate) struct Fp8Cells {
    cells: Buffer,
    /// Codes of weights that are kept for the step.
    kept: Vec<KeptWeight>,
}

struct KeptWeight {
    of: Fp8Weight,
    codes: Buffer,
    /// Whether the codes are those of an earlier step.
    is_stale: bool,
}

impl Fp8Cells {
    /// Cells for so many blocks, and room for the codes of weights that are kept.
    pub(crate) fn lease(
        memory: &Memory,
        blocks: usize,
        kept: impl Iterator<Item = Fp8Weight>,
    ) -> Result<Fp8Cells, OutOfMemory> {
        let cells = [blocks * LAYERS * OPERANDS * CELLS];
        let of_e4m3 = Fp8::E4m3.dtype();
        let kept = kept.map(|of| {
            let codes =
                memory.lease_persistent(Category::Parameter, "fp8_weights", of.shape, of_e4m3)?;
            Ok(KeptWeight {
                of,
                codes,
                is_stale: true,
            })
        });
        Ok(Fp8Cells {
            cells: memory.lease_persistent(
                Category::Activation,
                "fp8_scales",
                cells,
                DType::F32,
            )?,
            kept: kept.collect::<Result<_, OutOfMemory>>()?,
        })
    }

    /// From now on weights may be others.
    pub(crate) fn begin_step(&mut self) {
        self.kept.iter_mut().for_each(|kept| kept.is_stale = true);
    }

    /// Bytes of codes of weights that are kept.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.kept.iter().map(|kept| kept.codes.bytes()).sum()
    }

    fn of(&self, block: usize, layer: Fp8Layer) -> Option<usize> {
        let mut all = self.kept.iter();
        all.position(|kept| (kept.of.block, kept.of.layer) == (block, layer))
    }

    /// Whether the codes of a layer's weight are kept, and made in this step already.
    pub(crate) fn is_fresh(&self, block: usize, layer: Fp8Layer) -> bool {
        let found = self.of(block, layer);
        found.is_some_and(|found| !self.kept[found].is_stale)
    }

    /// The codes of a layer's weight, if they are kept.
    pub(crate) fn kept(&self, block: usize, layer: Fp8Layer) -> Option<In<'_>> {
        let found = self.of(block, layer)?;
        Some(self.kept[found].codes.view())
    }

    /// Makes the kept codes of a layer's weight, if that is its first use in the step. Whether they are kept.
    pub(crate) fn keep(
        &mut self,
        kernels: &Kernels,
        (block, layer): (usize, Fp8Layer),
        weight: In,
    ) -> Result<bool, ModelError> {
        let Some(found) = self.of(block, layer) else {
            return Ok(false);
        };
        if std::mem::take(&mut self.kept[found].is_stale) {
            let place = Fp8Cells::place(block, layer, Multiplied::Weight);
            let codes = self.kept[found].codes.view_mut();
            quantise(
                kernels,
                self.cells.view_mut().rows(place..place + CELLS),
                (codes, weight),
            )?;
        }
        Ok(true)
    }

    /// The first of an operand's cells.
    pub(crate) fn place(block: usize, layer: Fp8Layer, operand: Multiplied) -> usize {
        ((block * LAYERS + layer as usize) * OPERANDS + operand as usize) * CELLS
    }

    pub(crate) fn scale(&self, place: usize) -> In<'_> {
        self.cells.view().rows(place..place + 1)
    }

    /// Makes codes of `x`, and their scale.
    pub(crate) fn quantise(
        &mut self,
        kernels: &Kernels,
        place: usize,
        (codes, x): (Out, In),
    ) -> Result<(), ModelError> {
        quantise(
            kernels,
            self.cells.view_mut().rows(place..place + CELLS),
            (codes, x),
        )
    }
}

/// Makes codes, and in an operand's cells the scale and the largest magnitude.
fn quantise(kernels: &Kernels, cells: Out, (codes, x): (Out, In)) -> Result<(), ModelError> {
    let (scale, rest) = cells.split_at(1);
    let (mut largest, _) = rest.split_at(1);
    kernels.run(AbsMax {
        out: largest.reborrow(),
        x,
    })?;
    Ok(kernels.run(Quantise {
        codes,
        scale,
        x,
        largest: largest.as_in(),
    })?)
}

/// An output of a stage in the compute type, which is kept as it is or as codes.
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

/// Codes of a weight.
pub(crate) enum WeightCodes {
    Made(Buffer),
    /// Those of a layer of a block.
    Kept(usize, Fp8Layer),
}

impl WeightCodes {
    pub(crate) fn view<'p>(&'p self, cells: &'p Fp8Cells) -> In<'p> {
        match self {
            WeightCodes::Made(codes) => codes.view(),
            WeightCodes::Kept(block, layer) => cells.kept(*block, *layer).expect("they were made"),
        }
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
