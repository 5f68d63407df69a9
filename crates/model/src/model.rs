//! A model on a device: its architecture, where its parameters lie, and how it computes.

use crate::parameters::{LayoutIndices, ParameterId};
use crate::replays::ReplayCounts;
use crate::stages::{Rotary, RotaryTables};
use crate::{Architecture, BatchShape, Extent, Result};
use kernels::Kernels;
use memory::{Buffer, Category, DType, Dims, In, Layer, Layout, Memory};
use std::ops::Range;
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
    /// Those of the architecture's rotary embeddings.
    rotary_tables: Vec<RotaryTables>,
    places: Option<Buffer>,
    computation: Computation,
    no_replays: ReplayCounts,
}

impl Model {
    /// A model with its parameters in a layout made from its architecture ([`crate::Parameters::layout`]).
    ///
    /// # Errors
    /// `ModelError` if the rotary table does not fit.
    pub fn new(
        architecture: Architecture,
        layout: Rc<Layout>,
        memory: &Memory,
        kernels: &Kernels,
        computation: Computation,
    ) -> Result<Model> {
        let rotary = architecture.rotary.iter();
        let tables = rotary.map(|rotary| rotary.lease(memory, kernels, computation.seq));
        let tables = tables.collect::<Result<_>>()?;
        let needs_places = architecture.turns_in_tiles(computation.seq);
        let places = needs_places.then(|| places(memory, kernels, computation.seq));
        Ok(Model {
            places: places.transpose()?,
            rotary_tables: tables,
            indices: architecture.parameters.layout_indices(),
            no_replays: ReplayCounts::none(architecture.stage_names()),
            architecture,
            layout,
            computation,
        })
    }

    /// Its embedding, blocks, head and parameters.
    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// Number of blocks.
    pub fn layers(&self) -> usize {
        self.architecture.blocks.len()
    }

    /// Sizes `[b s, h]` and type of a block's input.
    pub fn input_of_block(&self, batch: BatchShape) -> (Dims, DType) {
        let extent = Extent::tokens(self.architecture.width());
        extent.resolve(batch, self.dtype())
    }

    /// The place of each parameter in the arenas.
    pub fn layout(&self) -> &Rc<Layout> {
        &self.layout
    }

    /// Type of weights and activations.
    pub fn dtype(&self) -> DType {
        self.computation.dtype
    }

    /// Counts of replays for its stages, all zero.
    pub fn no_replays(&self) -> ReplayCounts {
        self.no_replays.clone()
    }

    pub(crate) fn head_chunk(&self) -> usize {
        self.computation.head_chunk
    }

    /// The index of a parameter in the layout.
    pub(crate) fn index(&self, id: ParameterId) -> usize {
        self.indices.of(id)
    }

    /// The unit of the matrices among some parameters; none if all are vectors.
    ///
    /// # Panics
    /// If the matrices are of several units: a stage has only one on the device. Matrices in groups do not count: their stage brings the groups.
    pub(crate) fn unit_of(&self, parameters: &[ParameterId]) -> Option<usize> {
        let units = parameters.iter().map(|id| self.index(*id));
        let mut units = units.filter_map(|entry| self.layout.unit_of(entry));
        let first = units.next();
        assert!(
            units.all(|unit| Some(unit) == first),
            "a stage uses matrices of one unit"
        );
        first
    }

    /// The unit of a part of the model; none if it declares no matrix.
    pub(crate) fn unit_of_part(&self, part: Layer) -> Option<usize> {
        self.layout.unit_of_part(part)
    }

    /// The units that a forward pass through some blocks uses, in order: before the first block also the embedding's, after the last
    /// also the head's.
    pub fn units_forward(&self, layers: &Range<usize>) -> Vec<usize> {
        let architecture = &self.architecture;
        let stages = architecture.stages_of(layers.clone());
        let head = (layers.end == self.layers()).then(|| &architecture.head_parameters[..]);
        let users = stages.map(|declared| &declared.parameters[..]).chain(head);
        let units = users.flat_map(|parameters| {
            let groups = parameters
                .iter()
                .map(|id| self.layout.units_of(self.index(*id)));
            let groups = groups.filter(|groups| groups.len() > 1).flatten();
            // Behind its groups a stage goes back to its other matrices.
            let own = self.unit_of(parameters);
            own.into_iter().chain(groups).chain(own)
        });
        let mut units: Vec<usize> = units.collect();
        units.dedup();
        units
    }

    /// The positions of a sequence in order, `[s]` i32. The positions of a part of a sequence are some rows of it.
    pub(crate) fn places(&self) -> In<'_> {
        let places = self.places.as_ref();
        places
            .expect("they are leased where parts of sequences are turned")
            .view()
    }

    /// Row of the rotary tables at which a text of `length` tokens begins: 0, or the first short row where LongRoPE's short factors
    /// apply. A token's position is counted from it.
    pub fn first_table_row(&self, length: usize) -> usize {
        match (1..=self.longest_short_text()).contains(&length) {
            true => self.computation.seq,
            false => 0,
        }
    }

    /// The longest text that LongRoPE's short factors turn, if sequences may be longer; else 0.
    pub fn longest_short_text(&self) -> usize {
        let rotary = self.architecture.rotary.iter();
        let rows = rotary.map(|rotary| rotary.short_rows(self.computation.seq));
        rows.max().unwrap_or(0)
    }

    /// The tables of a rotary embedding: that of keys, and that of queries if they have their own.
    pub(crate) fn rotary_tables(&self, rotary: &Rotary) -> (In<'_>, Option<In<'_>>) {
        let mut known = self.architecture.rotary.iter();
        let at = known.position(|known| known == rotary);
        let at = at.expect("stages turn only by rotary embeddings of their architecture");
        let RotaryTables { keys, queries } = &self.rotary_tables[at];
        (keys.view(), queries.as_ref().map(Buffer::view))
    }
}

/// The numbers from 0 to `seq - 1`, in memory that lives across steps.
fn places(memory: &Memory, kernels: &Kernels, seq: usize) -> Result<Buffer> {
    let mut places = memory.lease_persistent(Category::Parameter, "places", [seq], DType::I32)?;
    if !places.is_shape() {
        let numbers: Vec<i32> = (0..seq as i32).collect();
        kernels.upload(places.view_mut(), bytemuck::cast_slice(&numbers))?;
    }
    Ok(places)
}
