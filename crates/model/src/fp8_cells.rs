//! Cells of FP8: the scale and the largest magnitude of each operand, and the codes of weights that are kept for a step.

use crate::ModelError;
use crate::fp8::{Fp8Layer, Fp8Operand, Fp8Weight};
use crate::fp8_zeros::{Fp8Site, Fp8Zeros};
use kernels::Kernels;
use kernels::fp8::Fp8;
use kernels::operation::{AbsMax, Quantise, QuantiseTransposed};
use memory::{Buffer, Category, DType, In, Memory, Out, OutOfMemory};
use std::ops::Range;

/// Operands of a layer beside its weight: input and gradient.
const OPERANDS: usize = 2;
const LAYERS: usize = Fp8Layer::ALL.len();
/// Cells of an operand: its scale, its largest magnitude, and two that are not used, because cuBLASLt takes scales at multiples of
/// 16 bytes.
const CELLS: usize = 4;

/// Where codes of `x [m, n]` go.
pub(crate) enum CodesTo<'a> {
    /// `[m, n]`
    AsTheyAre(Out<'a>),
    /// `[n, padded m]`, e4m3
    Transposed(Out<'a>),
}

/// The scales of one micro-batch's activations and gradients in a run of blocks. A replay, and a backward pass that makes codes of an
/// input again, take the largest magnitude that the forward pass has found.
pub(crate) struct Fp8Cells {
    /// The first block.
    first: usize,
    cells: Buffer,
    /// Whether an operand's largest magnitude is this micro-batch's.
    is_found: Vec<bool>,
}

fn lease_cells(
    memory: &Memory,
    name: &'static str,
    operands: usize,
) -> Result<Buffer, OutOfMemory> {
    let dims = [operands * CELLS];
    memory.lease_persistent(Category::Activation, name, dims, DType::F32)
}

impl Fp8Cells {
    /// # Errors
    /// [`OutOfMemory`] if it is refused.
    pub(crate) fn lease(memory: &Memory, blocks: &Range<usize>) -> Result<Fp8Cells, OutOfMemory> {
        let operands = blocks.len() * LAYERS * OPERANDS;
        Ok(Fp8Cells {
            first: blocks.start,
            cells: lease_cells(memory, "fp8_scales", operands)?,
            is_found: vec![false; operands],
        })
    }

    /// From now on the operands of a block are those of another micro-batch.
    pub(crate) fn begin_block(&mut self, block: usize) {
        let first = (block - self.first) * LAYERS * OPERANDS;
        self.is_found[first..first + LAYERS * OPERANDS].fill(false);
    }

    fn number(&self, (block, layer, operand): Fp8Site) -> usize {
        let operand = usize::from(operand == Fp8Operand::Gradient);
        ((block - self.first) * LAYERS + layer as usize) * OPERANDS + operand
    }

    /// The scale of an input or a gradient, `[1]`.
    pub(crate) fn scale(&self, site: Fp8Site) -> In<'_> {
        scale(&self.cells, self.number(site))
    }

    /// Makes codes of an input or a gradient, and their scale.
    ///
    /// # Errors
    /// [`ModelError`] if the device fails.
    pub(crate) fn quantise(
        &mut self,
        (kernels, zeros): (&Kernels, &mut Fp8Zeros),
        site: Fp8Site,
        (codes, x): (CodesTo, In),
    ) -> Result<(), ModelError> {
        let number = self.number(site);
        let is_found = std::mem::replace(&mut self.is_found[number], true);
        let zeros = (!is_found).then(|| zeros.of(site, x.elements()));
        quantise(kernels, (&mut self.cells, number), zeros, (codes, x))
    }
}

/// The scales of weights, and the codes of those that are kept for a step. All micro-batches use them.
pub(crate) struct Fp8Weights {
    cells: Buffer,
    weights: Vec<CodedWeight>,
}

struct CodedWeight {
    of: Fp8Weight,
    /// None: codes are made at each use.
    kept: Option<Buffer>,
    /// Whether its scale, and the codes that are kept, are those of an earlier step.
    is_stale: bool,
}

impl Fp8Weights {
    /// Cells for the scales of these weights, and room for their codes if they are kept.
    ///
    /// # Errors
    /// [`OutOfMemory`] if it is refused.
    pub(crate) fn lease(
        memory: &Memory,
        weights: &[Fp8Weight],
        keeps_codes: bool,
    ) -> Result<Fp8Weights, OutOfMemory> {
        let of_e4m3 = Fp8::E4m3.dtype();
        let lease =
            |shape| memory.lease_persistent(Category::Parameter, "fp8_weights", shape, of_e4m3);
        let weights = weights.iter().map(|of| {
            Ok(CodedWeight {
                of: *of,
                kept: keeps_codes.then(|| lease(of.shape)).transpose()?,
                is_stale: true,
            })
        });
        let weights = weights.collect::<Result<Vec<_>, OutOfMemory>>()?;
        Ok(Fp8Weights {
            cells: lease_cells(memory, "fp8_weight_scales", weights.len())?,
            weights,
        })
    }

    /// From now on weights may be others.
    pub(crate) fn begin_step(&mut self) {
        let weights = self.weights.iter_mut();
        weights.for_each(|weight| weight.is_stale = true);
    }

    /// Bytes of codes that are kept.
    pub(crate) fn kept_bytes(&self) -> u64 {
        let kept = self
            .weights
            .iter()
            .filter_map(|weight| weight.kept.as_ref());
        kept.map(Buffer::bytes).sum()
    }

    fn number(&self, block: usize, layer: Fp8Layer) -> usize {
        let mut all = self.weights.iter();
        let found = all.position(|weight| (weight.of.block, weight.of.layer) == (block, layer));
        found.expect("a layer with products in FP8 has a weight")
    }

    /// The scale of a layer's weight, `[1]`.
    pub(crate) fn scale(&self, block: usize, layer: Fp8Layer) -> In<'_> {
        scale(&self.cells, self.number(block, layer))
    }

    /// Whether codes of weights are kept for the step.
    pub(crate) fn keeps_codes(&self) -> bool {
        self.weights.iter().any(|weight| weight.kept.is_some())
    }

    /// The codes of a layer's weight that are kept, if they are this step's.
    pub(crate) fn kept(&self, block: usize, layer: Fp8Layer) -> Option<In<'_>> {
        let weight = &self.weights[self.number(block, layer)];
        let kept = weight.kept.as_ref().filter(|_| !weight.is_stale);
        kept.map(Buffer::view)
    }

    /// Makes codes of a layer's weight, and their scale: in `made`, or those that are kept for the step.
    ///
    /// # Errors
    /// [`ModelError`] if the device fails.
    pub(crate) fn quantise(
        &mut self,
        (kernels, zeros): (&Kernels, &mut Fp8Zeros),
        (block, layer): (usize, Fp8Layer),
        (made, x): (Option<CodesTo>, In),
    ) -> Result<(), ModelError> {
        let number = self.number(block, layer);
        let weight = &mut self.weights[number];
        let is_first = std::mem::replace(&mut weight.is_stale, false);
        let site = (block, layer, Fp8Operand::Weight);
        let zeros = is_first.then(|| zeros.of(site, x.elements()));
        let kept = weight.kept.as_mut().map(Buffer::view_mut);
        let codes = made.or(kept.map(CodesTo::AsTheyAre));
        let codes = codes.expect("codes have a place");
        quantise(kernels, (&mut self.cells, number), zeros, (codes, x))
    }
}

fn scale(cells: &Buffer, operand: usize) -> In<'_> {
    let first = operand * CELLS;
    cells.view().rows(first..first + 1)
}

/// Makes codes, and in an operand's cells their scale. The first time also finds the largest magnitude, and counts zeros.
fn quantise(
    kernels: &Kernels,
    (cells, operand): (&mut Buffer, usize),
    zeros: Option<Out>,
    (codes, x): (CodesTo, In),
) -> Result<(), ModelError> {
    let first = operand * CELLS;
    let cells = cells.view_mut().rows(first..first + CELLS);
    let (scale, rest) = cells.split_at(1);
    let (mut largest, _) = rest.split_at(1);
    if zeros.is_some() {
        kernels.run(AbsMax {
            out: largest.reborrow(),
            x,
        })?;
    }
    let largest = largest.as_in();
    Ok(match codes {
        CodesTo::AsTheyAre(codes) => kernels.run(Quantise {
            codes,
            scale,
            zeros,
            x,
            largest,
        }),
        CodesTo::Transposed(codes) => kernels.run(QuantiseTransposed {
            codes,
            scale,
            x,
            largest,
        }),
    }?)
}
