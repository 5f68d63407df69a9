//! FP8 among the saved activations: each micro-batch has its own scales of inputs and gradients, and all share those of weights.

use super::SavedActivations;
use crate::fp8::{Fp8Operand, Fp8Site};
use crate::fp8_cells::{CodedOperand, CodesTo, WeightCells};
use crate::fp8_underflows::Fp8Underflows;
use crate::parameters::Parameters;
use crate::{BatchShape, Result};
use kernels::operation::OutputForm;
use kernels::{KernelError, Kernels};
use memory::{In, Memory, Out, OutOfMemory};

/// The scales of weights, and the counts of underflows. All micro-batches share them.
pub(crate) struct Fp8State {
    pub(super) weights: WeightCells,
    pub(super) underflows: Fp8Underflows,
}

const IN_FP8: &str = "the model has products in FP8";

impl Fp8State {
    /// Leases both for a rank that holds some of a model's blocks; none if the model multiplies nothing in FP8.
    ///
    /// # Errors
    /// [`OutOfMemory`] if it is refused.
    pub(crate) fn lease(
        memory: &Memory,
        (parameters, blocks): (&Parameters, usize),
        is_held: impl Fn(usize) -> bool,
        batch: BatchShape,
    ) -> Result<Option<Fp8State>, OutOfMemory> {
        if !parameters.has_fp8() {
            return Ok(None);
        }
        let all = parameters.weights_in_fp8();
        let own = all.iter().map(|weight| weight.site);
        let own = own.filter(|site| is_held(site.block));
        Ok(Some(Fp8State {
            weights: WeightCells::lease(memory, own.collect())?,
            underflows: Fp8Underflows::lease(memory, blocks, (all, batch))?,
        }))
    }

    pub(super) fn begin_step(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        self.weights.begin_step();
        self.underflows.begin_step(kernels)
    }
}

impl SavedActivations {
    /// How many numbers [`SavedActivations::count_underflows`] gives; 0 if it gives none.
    pub fn underflows_counted(&self) -> usize {
        let fp8 = self.fp8.as_ref();
        fp8.map_or(0, |fp8| fp8.underflows.counted())
    }

    /// How many elements of operands in FP8 this rank has made zero in the step, and of how many: what
    /// [`crate::UnderflowShare::of_counts`] takes. None if the model multiplies nothing in FP8.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn count_underflows(&mut self, kernels: &Kernels) -> Result<Option<In<'_>>, KernelError> {
        let fp8 = self.fp8.as_mut();
        fp8.map(|fp8| fp8.underflows.end_step(kernels)).transpose()
    }

    /// Called when another micro-batch begins to use the table: its operands in FP8 have other scales.
    pub(crate) fn begin_micro_batch(&mut self) {
        if let Some(cells) = &mut self.tables[self.current].fp8_cells {
            cells.begin_micro_batch();
        }
    }

    /// The scale of an operand, `[1]`; of an input or a gradient that of the table's micro-batch.
    ///
    /// # Panics
    /// If the model multiplies nothing in FP8.
    pub(crate) fn fp8_scale(&self, site: Fp8Site) -> In<'_> {
        match site.operand {
            Fp8Operand::Weight => self.fp8.as_ref().expect(IN_FP8).weights.scale(site),
            Fp8Operand::Input | Fp8Operand::Gradient => {
                let cells = self.table().fp8_cells.as_ref();
                cells.expect(IN_FP8).scale(site)
            }
        }
    }

    /// Where an operand's cells are, and where its underflows are counted.
    fn operand(&mut self, site: Fp8Site) -> (CodedOperand<'_>, &mut Fp8Underflows) {
        let fp8 = self.fp8.as_mut().expect(IN_FP8);
        let cells = &mut self.tables[self.current].fp8_cells;
        let operand = match site.operand {
            Fp8Operand::Weight => fp8.weights.operand(site),
            Fp8Operand::Input | Fp8Operand::Gradient => cells.as_mut().expect(IN_FP8).operand(site),
        };
        (operand, &mut fp8.underflows)
    }

    /// Where the caller writes the largest magnitude of an operand, `[1]`, before it becomes codes; none if it is known.
    ///
    /// # Panics
    /// As [`SavedActivations::fp8_scale`].
    pub(crate) fn largest_to_find(&mut self, site: Fp8Site) -> Option<Out<'_>> {
        self.operand(site).0.largest_to_find()
    }

    /// Whether the values of an input or a gradient were made codes before in this micro-batch.
    ///
    /// # Panics
    /// As [`SavedActivations::fp8_scale`].
    pub(crate) fn was_coded(&mut self, site: Fp8Site) -> bool {
        self.operand(site).0.was_coded()
    }

    /// The form in which a stage writes an operand: as codes, or as values.
    ///
    /// # Panics
    /// As [`SavedActivations::fp8_scale`].
    pub(crate) fn form(&mut self, site: Fp8Site, is_codes: bool) -> OutputForm<'_> {
        self.operand(site).0.form(is_codes)
    }

    /// Makes codes of an operand, and their scale.
    ///
    /// # Errors
    /// [`ModelError`] if the device fails.
    ///
    /// # Panics
    /// As [`SavedActivations::fp8_scale`].
    pub(crate) fn quantise(
        &mut self,
        kernels: &Kernels,
        site: Fp8Site,
        of: (CodesTo, In),
    ) -> Result {
        let (operand, underflows) = self.operand(site);
        operand.quantise((kernels, underflows), of)
    }
}
