//! The table of saved activations of one micro-batch. It is made once, and every micro-batch uses it.

use crate::balance::Balance;
use crate::fp8::Fp8Cells;
use crate::host_places::{Arriving, HostPlaces, Leaving};
use crate::policy::Action;
use crate::statistics::Statistics;
use crate::{Activation, BatchShape, Extent, LayerActivation};
use memory::{Buffer, Category, DType, In, Memory, OutOfMemory};
use std::rc::Rc;

/// Activations by layer, each with its action. A live one is frozen while it is in the table: it is read through `Rc`s,
/// and nobody writes it.
pub struct SavedActivations {
    layers: Vec<Vec<Slot>>,
    pub(crate) host: HostPlaces,
    pub(crate) statistics: Statistics,
    /// None if the model's routers have no loss of balance.
    pub(crate) balance: Option<Balance>,
    /// None if the model multiplies nothing in FP8.
    pub(crate) fp8: Option<Fp8Cells>,
    pub(crate) dtype: DType,
}

/// The place of one activation in the table.
pub(crate) struct Slot {
    pub(crate) activation: Activation,
    pub(crate) extent: Extent,
    action: Action,
    pub(crate) state: SlotState,
}

/// Where an activation is.
#[derive(Default)]
pub(crate) enum SlotState {
    /// Not made yet, dropped, or released.
    #[default]
    Absent,
    /// Device memory holds it.
    Live(Rc<Buffer>),
    /// Device memory holds it, and it is being copied to the host.
    Leaving(Leaving),
    /// Only the host holds it.
    Away,
    /// It is being copied from the host into device memory.
    Arriving(Arriving),
}

impl SavedActivations {
    /// An empty table of activations by layer, with pinned host memory for what a micro-batch of this shape offloads.
    pub(crate) fn lease(
        memory: &Memory,
        layers: Vec<Vec<(Activation, Extent, Action)>>,
        (statistics, balance, fp8): (Statistics, Option<Balance>, Option<Fp8Cells>),
        dtype: DType,
        batch: BatchShape,
    ) -> Result<SavedActivations, OutOfMemory> {
        let numbered = layers.iter().enumerate();
        let offloaded = numbered.flat_map(|(layer, table)| {
            let offloaded = table
                .iter()
                .filter(|(.., action)| *action == Action::Offload);
            offloaded.map(move |(activation, extent, _)| {
                let activation = *activation;
                let (dims, dtype) = extent.resolve(batch, dtype);
                let bytes = dims.elements() * dtype.size_in_bytes();
                (LayerActivation { layer, activation }, bytes)
            })
        });
        let host = HostPlaces::lease(memory, offloaded)?;
        let slot = |(activation, extent, action)| Slot {
            activation,
            extent,
            action,
            state: SlotState::Absent,
        };
        let slots = |table: Vec<_>| table.into_iter().map(slot).collect();
        Ok(SavedActivations {
            layers: layers.into_iter().map(slots).collect(),
            host,
            statistics,
            balance,
            fp8,
            dtype,
        })
    }

    /// Starts the stages' counts afresh.
    pub fn begin_step(&mut self) {
        self.statistics.begin_step();
        if let Some(fp8) = &mut self.fp8 {
            fp8.begin_step();
        }
    }

    /// Bytes of codes of weights that are kept for each step.
    pub fn coded_weight_bytes(&self) -> u64 {
        self.fp8.as_ref().map_or(0, Fp8Cells::kept_bytes)
    }

    /// What all stages have counted in this step, `[n]` f32 in their order; none if no stage counts.
    pub fn all_statistics(&self) -> Option<In<'_>> {
        self.statistics.all()
    }

    /// What a stage of a layer has counted in this step, `[n]` f32; none if it has counted nothing.
    pub fn statistics(&self, layer: usize, stage: &str) -> Option<In<'_>> {
        self.statistics.of(layer, stage)
    }

    /// What happens to an activation between forward and backward.
    pub(crate) fn action(&self, at: LayerActivation) -> Action {
        self.slot(at).action
    }

    /// The slot of an activation.
    ///
    /// # Panics
    /// If the block has no such activation.
    pub(crate) fn slot(&self, at: LayerActivation) -> &Slot {
        let mut slots = self.layers[at.layer].iter();
        let slot = slots.find(|slot| slot.activation == at.activation);
        slot.unwrap_or_else(|| panic!("there is no {at}"))
    }

    /// The slot of an activation, to be changed.
    pub(crate) fn slot_mut(&mut self, at: LayerActivation) -> &mut Slot {
        let mut slots = self.layers[at.layer].iter_mut();
        let slot = slots.find(|slot| slot.activation == at.activation);
        slot.unwrap_or_else(|| panic!("there is no {at}"))
    }

    fn state(&self, at: LayerActivation) -> &SlotState {
        &self.slot(at).state
    }

    /// All slots of a block.
    pub(crate) fn block(&mut self, layer: usize) -> &mut [Slot] {
        &mut self.layers[layer]
    }

    /// Whether the activation is neither in device memory nor on the host.
    pub(crate) fn is_absent(&self, at: LayerActivation) -> bool {
        matches!(self.state(at), SlotState::Absent)
    }

    /// Whether the activation is on the host alone. Activations of tiles never are.
    pub(crate) fn is_away(&self, at: LayerActivation) -> bool {
        let slot =
            |slot: &Slot| slot.activation == at.activation && matches!(slot.state, SlotState::Away);
        self.layers[at.layer].iter().any(slot)
    }

    /// The activation, if it is live.
    pub(crate) fn get(&self, at: LayerActivation) -> Option<&Rc<Buffer>> {
        match self.state(at) {
            SlotState::Live(buffer) => Some(buffer),
            _ => None,
        }
    }

    /// Files an activation.
    pub(crate) fn put(&mut self, at: LayerActivation, buffer: Buffer) {
        let state = &mut self.slot_mut(at).state;
        let previous = std::mem::replace(state, SlotState::Live(Rc::new(buffer)));
        assert!(matches!(previous, SlotState::Absent), "{at} was made twice");
    }

    /// Drops an activation.
    ///
    /// # Panics
    /// If somebody still reads or copies it, since its memory would then come back later than planned.
    pub(crate) fn release(&mut self, at: LayerActivation) {
        if !self.is_absent(at) {
            drop(self.take_unread(at));
        }
    }

    /// Takes a live activation out, to be overwritten. It is a temporary from then on.
    ///
    /// # Panics
    /// As [`SavedActivations::take_unread`].
    pub(crate) fn take(&mut self, at: LayerActivation) -> Buffer {
        let mut buffer = self.take_unread(at);
        buffer.recategorize(Category::Temporary);
        buffer
    }

    /// Takes a live activation out.
    ///
    /// # Panics
    /// If it is not live, or somebody still reads it.
    pub(crate) fn take_unread(&mut self, at: LayerActivation) -> Buffer {
        let live = match std::mem::take(&mut self.slot_mut(at).state) {
            SlotState::Live(buffer) => Rc::into_inner(buffer),
            _ => None,
        };
        live.unwrap_or_else(|| panic!("{at} leaves the table when it is live and nobody reads it"))
    }

    /// Drops everything. No copy may be under way.
    pub(crate) fn clear(&mut self) {
        let slots = self.layers.iter_mut().flatten();
        slots.for_each(|slot| slot.state = SlotState::Absent);
    }

    /// Whether it holds no activation.
    pub fn is_empty(&self) -> bool {
        let mut slots = self.layers.iter().flatten();
        slots.all(|slot| matches!(slot.state, SlotState::Absent))
    }
}
