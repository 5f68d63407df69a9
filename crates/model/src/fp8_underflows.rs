//! How many numbers underflow where they become codes of FP8: they are not zero, and their codes are. Counted over a step.

use crate::BatchShape;
use crate::fp8::Fp8Site;
use crate::parameters::Fp8Weight;
use kernels::operation::{Fill, Quantise, SumInOrder};
use kernels::{Init, KernelError, Kernels};
use memory::{Buffer, Category, DType, In, Memory, Out, OutOfMemory};

/// An entry for every operand of every layer and block of the model, so that ranks can add theirs up; 0 where this rank makes no codes.
pub(crate) struct Fp8Underflows {
    /// `[parts, sites]` f32: underflows in parts of a tensor ([`Quantise::underflows`]).
    parts: Buffer,
    /// `[2 sites]` f32: the underflows of each site; then all elements of each.
    counts: Buffer,
    /// Elements of each site that the step has counted so far.
    elements: Vec<u64>,
}

impl Fp8Underflows {
    /// Room for counts of so many blocks, whose weights in FP8 are these.
    ///
    /// # Errors
    /// [`OutOfMemory`] if it is refused.
    pub(crate) fn lease(
        memory: &Memory,
        blocks: usize,
        (weights, batch): (&[Fp8Weight], BatchShape),
    ) -> Result<Fp8Underflows, OutOfMemory> {
        let sites = blocks * Fp8Site::OF_BLOCK;
        let largest = weights.iter().map(|weight| {
            let [outputs, inputs] = weight.shape;
            (outputs * inputs).max(batch.tokens() * outputs.max(inputs))
        });
        let parts = Quantise::parts(largest.max().unwrap_or(0));
        let lease = |name, elements: usize| {
            memory.lease_persistent(Category::Activation, name, [elements], DType::F32)
        };
        Ok(Fp8Underflows {
            parts: lease("fp8_underflows_of_parts", parts * sites)?,
            counts: lease("fp8_underflows", 2 * sites)?,
            elements: vec![0; sites],
        })
    }

    /// How many numbers [`Fp8Underflows::end_step`] gives.
    pub(crate) fn counted(&self) -> usize {
        2 * self.elements.len()
    }

    /// # Errors
    /// [`KernelError`] if the device fails.
    pub(crate) fn begin_step(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        self.elements.fill(0);
        kernels.run(Fill {
            out: self.parts.view_mut(),
            value: 0.0,
        })
    }

    /// Where underflows of a site are counted, `[parts, 1]`, of which there are so many elements more.
    pub(crate) fn of(&mut self, site: Fp8Site, elements: usize) -> Out<'_> {
        let (number, sites) = (site.number(), self.elements.len());
        self.elements[number] += elements as u64;
        let parts = self.parts.view_mut();
        let rows = parts.elements() / sites;
        parts.reshape([rows, sites]).columns(number..number + 1)
    }

    /// Adds up the parts. Gives the underflows of each site; then all elements of each, `[2 sites]` f32: this rank's own.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub(crate) fn end_step(&mut self, kernels: &Kernels) -> Result<In<'_>, KernelError> {
        let sites = self.elements.len();
        let (out, mut all) = self.counts.view_mut().split_at(sites);
        let parts = self.parts.view();
        kernels.run(SumInOrder {
            out,
            x: parts.reshape([parts.elements() / sites, sites]),
            init: Init::Overwrite,
        })?;
        let elements: Vec<f32> = self.elements.iter().map(|count| *count as f32).collect();
        kernels.upload(all.reborrow(), bytemuck::cast_slice(&elements))?;
        Ok(self.counts.view())
    }
}

/// The share of an operand's elements that underflowed in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UnderflowShare {
    /// The operand.
    pub site: Fp8Site,
    /// From 0 to 1.
    pub share: f64,
}

impl UnderflowShare {
    /// The shares of all operands in FP8, from the counts of a step ([`crate::SavedActivations::count_underflows`]), of one rank or of
    /// several that are added up.
    pub fn of_counts(counts: &[f32]) -> Vec<UnderflowShare> {
        let (underflows, elements) = counts.split_at(counts.len() / 2);
        let counted = Fp8Site::all().zip(underflows.iter().zip(elements));
        let counted = counted.filter(|(_, (_, elements))| **elements > 0.0);
        let of = |(site, (underflows, elements)): (_, (&f32, &f32))| UnderflowShare {
            site,
            share: f64::from(*underflows) / f64::from(*elements),
        };
        counted.map(of).collect()
    }
}
