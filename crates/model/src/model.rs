//! A model on a device: its architecture, where its parameters lie, and how it computes.

use crate::parameters::{LayoutIndices, ParameterId};
use crate::replays::ReplayCounts;
use crate::{Architecture, ModelError};
use kernels::Kernels;
use memory::{Buffer, DType, In, Layout, Memory};
use std::rc::Rc;

/// How a model computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Computation {
    /// Type of weights and activations.
    pub dtype: DType,
    /// Tokens in a sequence, at most.
    pub seq: usize,
    /// Tokens in a chunk of the output head.
    pub head_chunk: usize,
}

/// A decoder-only transformer.
pub struct Model {
    architecture: Architecture,
    layout: Rc<Layout>,
    indices: LayoutIndices,
    rotary_table: Option<Buffer>,
    computation: Computation,
    no_replays: ReplayCounts,
}

impl Model {
    /// A model with its parameters in a layout made from its architecture ([`crate::Parameters::layout`]).
    ///
    /// # Errors
    /// [`ModelError`] if the rotary table does not fit.
    pub fn new(
        architecture: Architecture,
        layout: Rc<Layout>,
        memory: &Memory,
        kernels: &dyn Kernels,
        computation: Computation,
    ) -> Result<Model, ModelError> {
        let rotary = architecture.rotary();
        let table = rotary.map(|rotary| rotary.lease(memory, kernels, computation.seq));
        Ok(Model {
            rotary_table: table.transpose()?,
            indices: architecture.parameters().layout_indices(),
            no_replays: ReplayCounts::none(architecture.stage_names()),
            architecture,
            layout,
            computation,
        })
    }

    /// What it is made of.
    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// Number of blocks.
    pub fn layers(&self) -> usize {
        self.architecture.blocks().len()
    }

    /// Where each parameter lies.
    pub fn layout(&self) -> &Rc<Layout> {
        &self.layout
    }

    /// Type of weights and activations.
    pub fn dtype(&self) -> DType {
        self.computation.dtype
    }

    /// A count of replays for its stages.
    pub fn no_replays(&self) -> ReplayCounts {
        self.no_replays.clone()
    }

    pub(crate) fn head_chunk(&self) -> usize {
        self.computation.head_chunk
    }

    /// Where a parameter stands in the layout.
    pub(crate) fn index(&self, id: ParameterId) -> usize {
        self.indices.of(id)
    }

    pub(crate) fn rotary_table(&self) -> In<'_> {
        let table = self.rotary_table.as_ref();
        table
            .expect("stages turn only in architectures with a rotary embedding")
            .view()
    }
}
