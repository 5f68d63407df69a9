//! How many numbers become zero where they become codes of FP8, counted over a step.

use crate::BatchShape;
use crate::fp8::{Fp8Layer, Fp8Operand, Fp8Weight};
use kernels::operation::{Fill, Quantise, SumInOrder};
use kernels::{Init, KernelError, Kernels};
use memory::{Buffer, Category, DType, In, Memory, Out, OutOfMemory};

/// An operand of a layer of a block.
pub(crate) type Fp8Site = (usize, Fp8Layer, Fp8Operand);

/// Counts of every operand of every layer of every block, also of those that are not in FP8, or that other ranks compute: zeros.
pub(crate) struct Fp8Zeros {
    /// `[parts, sites]` f32: elements that became zero, in parts of a tensor ([`Quantise::zeros`]).
    parts: Buffer,
    /// `[2 sites]` f32: of each site the elements that became zero; then of each site all elements.
    counts: Buffer,
    /// Elements of each site that the step has counted so far.
    elements: Vec<u64>,
}

impl Fp8Zeros {
    /// Room for counts of so many blocks, whose weights in FP8 are these.
    ///
    /// # Errors
    /// [`OutOfMemory`] if it is refused.
    pub(crate) fn lease(
        memory: &Memory,
        blocks: usize,
        (weights, batch): (&[Fp8Weight], BatchShape),
    ) -> Result<Fp8Zeros, OutOfMemory> {
        let sites = blocks * Fp8Layer::ALL.len() * Fp8Operand::ALL.len();
        let largest = weights.iter().map(|weight| {
            let [outputs, inputs] = weight.shape;
            (outputs * inputs).max(batch.tokens() * outputs.max(inputs))
        });
        let parts = Quantise::parts(largest.max().unwrap_or(0));
        let lease = |name, elements: usize| {
            memory.lease_persistent(Category::Activation, name, [elements], DType::F32)
        };
        Ok(Fp8Zeros {
            parts: lease("fp8_zeros_of_parts", parts * sites)?,
            counts: lease("fp8_zeros", 2 * sites)?,
            elements: vec![0; sites],
        })
    }

    /// How many numbers [`Fp8Zeros::end_step`] gives.
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

    /// Where zeros of a site are counted, `[parts, 1]`, of which there are so many elements more.
    pub(crate) fn of(&mut self, site: Fp8Site, elements: usize) -> Out<'_> {
        let (number, sites) = (number(site), self.elements.len());
        self.elements[number] += elements as u64;
        let parts = self.parts.view_mut();
        let rows = parts.elements() / sites;
        parts.reshape([rows, sites]).columns(number..number + 1)
    }

    /// Adds up the parts: of each site of this rank the elements that became zero; then of each all elements. `[2 sites]` f32
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

fn number((block, layer, operand): Fp8Site) -> usize {
    (block * Fp8Layer::ALL.len() + layer as usize) * Fp8Operand::ALL.len() + operand as usize
}

/// What share of a tensor's elements became zero, though they were not, when they became codes of FP8.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShareOfZeros {
    /// The block.
    pub block: usize,
    /// The layer.
    pub layer: Fp8Layer,
    /// The operand.
    pub operand: Fp8Operand,
    /// From 0 to 1.
    pub share: f64,
}

impl ShareOfZeros {
    /// The shares of all operands in FP8, from the counts of a step, of one rank or of several that are added up.
    pub fn of_counts(counts: &[f32]) -> Vec<ShareOfZeros> {
        let (zeros, elements) = counts.split_at(counts.len() / 2);
        let layers = (0..).flat_map(|block| Fp8Layer::ALL.map(|layer| (block, layer)));
        let sites = layers
            .flat_map(|(block, layer)| Fp8Operand::ALL.map(|operand| (block, layer, operand)));
        let counted = sites.zip(zeros.iter().zip(elements));
        let of = |((block, layer, operand), (zeros, elements)): (Fp8Site, (&f32, &f32))| {
            (*elements > 0.0).then(|| ShareOfZeros {
                block,
                layer,
                operand,
                share: f64::from(*zeros) / f64::from(*elements),
            })
        };
        counted.filter_map(of).collect()
    }
}
