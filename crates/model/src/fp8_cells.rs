//! Cells of FP8: the scale and the largest magnitude of each operand.

use crate::Result;
use crate::fp8::{Fp8Layer, Fp8Operand, Fp8Site};
use crate::fp8_underflows::Fp8Underflows;
use kernels::Kernels;
use kernels::operation::{AbsMax, OutputForm, Quantise, QuantiseTransposed};
use memory::{Buffer, Category, DType, In, Memory, Out, OutOfMemory};
use std::ops::Range;

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

/// The cells of several operands.
struct CodedOperands {
    cells: Buffer,
    known: Vec<OperandFacts>,
}

/// Which facts about an operand's present values are known.
#[derive(Clone, Copy, Debug, Default)]
struct OperandFacts {
    /// Whether its cells have its largest magnitude.
    largest: bool,
    /// Whether it was made codes, and its underflows were counted.
    codes: bool,
}

impl CodedOperands {
    fn lease(
        memory: &Memory,
        name: &'static str,
        count: usize,
    ) -> Result<CodedOperands, OutOfMemory> {
        let dims = [count * CELLS];
        Ok(CodedOperands {
            cells: memory.lease_persistent(Category::Activation, name, dims, DType::F32)?,
            known: vec![OperandFacts::default(); count],
        })
    }

    /// Called when all operands get new values.
    fn forget(&mut self) {
        self.known.fill(OperandFacts::default());
    }

    /// The scale of one, `[1]`.
    fn scale(&self, number: usize) -> In<'_> {
        let first = number * CELLS;
        self.cells.view().rows(first..first + 1)
    }

    fn operand(&mut self, number: usize, site: Fp8Site) -> CodedOperand<'_> {
        let first = number * CELLS;
        CodedOperand {
            site,
            cells: self.cells.view_mut().rows(first..first + 2),
            known: &mut self.known[number],
        }
    }
}

/// The cells of one operand.
pub(crate) struct CodedOperand<'a> {
    site: Fp8Site,
    /// Its scale and its largest magnitude, `[2]`.
    cells: Out<'a>,
    known: &'a mut OperandFacts,
}

impl<'a> CodedOperand<'a> {
    /// Whether it was made codes before, so that these can be made again at once.
    pub(crate) fn was_coded(&self) -> bool {
        self.known.codes
    }

    /// The form in which a stage writes it: codes, whose largest magnitude is known, or values.
    pub(crate) fn form(self, is_codes: bool) -> OutputForm<'a> {
        if is_codes {
            let (_, largest) = self.cells.split_at(1);
            return OutputForm::Codes(largest.into_in());
        }
        self.largest_to_find().into()
    }

    /// Where the caller writes the largest magnitude, `[1]`, before it becomes codes; none if it is known.
    pub(crate) fn largest_to_find(self) -> Option<Out<'a>> {
        let is_known = std::mem::replace(&mut self.known.largest, true);
        let (_, largest) = self.cells.split_at(1);
        (!is_known).then_some(largest)
    }

    /// Makes codes of `x`, and their scale. Finds the largest magnitude if it is not known. Codes as they are are counted in
    /// `underflows` when they are first made.
    ///
    /// # Errors
    /// [`ModelError`] if the device fails.
    pub(crate) fn quantise(
        self,
        (kernels, underflows): (&Kernels, &mut Fp8Underflows),
        (codes, x): (CodesTo, In),
    ) -> Result {
        let (scale, mut largest) = self.cells.split_at(1);
        if !std::mem::replace(&mut self.known.largest, true) {
            let out = largest.reborrow();
            kernels.run(AbsMax { out, x })?;
        }
        let largest = largest.as_in();
        let are_counted = self.known.codes;
        self.known.codes |= matches!(codes, CodesTo::AsTheyAre(_));
        Ok(match codes {
            CodesTo::AsTheyAre(codes) => kernels.run(Quantise {
                codes,
                scale,
                underflows: (!are_counted).then(|| underflows.of(self.site, x.elements())),
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
}

/// The inputs and gradients of one micro-batch in a run of blocks. A replay, and a backward pass that makes codes of an input again,
/// take the largest magnitude that the forward pass has found.
pub(crate) struct Fp8Cells {
    /// The first block.
    first: usize,
    operands: CodedOperands,
}

impl Fp8Cells {
    /// # Errors
    /// [`OutOfMemory`] if it is refused.
    pub(crate) fn lease(memory: &Memory, blocks: &Range<usize>) -> Result<Fp8Cells, OutOfMemory> {
        let operands = blocks.len() * Fp8Layer::ALL.len() * 2;
        Ok(Fp8Cells {
            first: blocks.start,
            operands: CodedOperands::lease(memory, "fp8_scales", operands)?,
        })
    }

    /// Called when another micro-batch begins to use these cells.
    pub(crate) fn begin_micro_batch(&mut self) {
        self.operands.forget();
    }

    fn number(&self, site: Fp8Site) -> usize {
        let layer = (site.block - self.first) * Fp8Layer::ALL.len() + site.layer as usize;
        let operand = match site.operand {
            Fp8Operand::Input => 0,
            Fp8Operand::Gradient => 1,
            Fp8Operand::Weight => panic!("weights are no micro-batch's"),
        };
        2 * layer + operand
    }

    /// The scale of an input or a gradient, `[1]`.
    pub(crate) fn scale(&self, site: Fp8Site) -> In<'_> {
        self.operands.scale(self.number(site))
    }

    pub(crate) fn operand(&mut self, site: Fp8Site) -> CodedOperand<'_> {
        let number = self.number(site);
        self.operands.operand(number, site)
    }
}

/// The cells of weights. All micro-batches use them.
pub(crate) struct WeightCells {
    operands: CodedOperands,
    sites: Vec<Fp8Site>,
}

impl WeightCells {
    /// # Errors
    /// [`OutOfMemory`] if it is refused.
    pub(crate) fn lease(memory: &Memory, sites: Vec<Fp8Site>) -> Result<WeightCells, OutOfMemory> {
        Ok(WeightCells {
            operands: CodedOperands::lease(memory, "fp8_weight_scales", sites.len())?,
            sites,
        })
    }

    /// Called when a step begins, since weights may have changed.
    pub(crate) fn begin_step(&mut self) {
        self.operands.forget();
    }

    fn number(&self, site: Fp8Site) -> usize {
        let found = self.sites.iter().position(|own| *own == site);
        found.expect("a layer with products in FP8 has a weight")
    }

    /// The scale of a weight, `[1]`.
    pub(crate) fn scale(&self, site: Fp8Site) -> In<'_> {
        self.operands.scale(self.number(site))
    }

    pub(crate) fn operand(&mut self, site: Fp8Site) -> CodedOperand<'_> {
        let number = self.number(site);
        self.operands.operand(number, site)
    }
}
