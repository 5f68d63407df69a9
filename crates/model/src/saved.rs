//! The table of saved activations of one micro-batch. It is made once, and every micro-batch uses it. In a pipeline several
//! micro-batches are under way at once, and each has a table.

mod fp8;

pub(crate) use fp8::Fp8State;

use crate::balance::Balance;
use crate::fp8_cells::Fp8Cells;
use crate::host_places::{Arriving, HostPlaces, Leaving};
use crate::policy::Action;
use crate::statistics::Statistics;
use crate::{Activation, BatchShape, Extent, LayerActivation};
use kernels::{KernelError, Kernels};
use memory::{Buffer, Category, DType, In, Memory, OutOfMemory};
use std::ops::Range;
use std::rc::Rc;

/// Activations by layer, each with its action. A live one is frozen while it is in the table: it is read through `Rc`s,
/// and nobody writes it.
pub struct SavedActivations {
    tables: Vec<Table>,
    /// The table in use.
    current: usize,
    pub(crate) statistics: Statistics,
    /// None if the model multiplies nothing in FP8.
    fp8: Option<Fp8State>,
    pub(crate) dtype: DType,
}

/// The activations of a block, and what becomes of each.
pub(crate) type BlockActions = Vec<(Activation, Extent, Action)>;

/// Neighbouring blocks that a rank computes, and of how many micro-batches it holds activations of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldBlocks {
    /// The blocks that it computes.
    pub layers: Range<usize>,
    /// How many micro-batches may be between their forward and their backward pass, each part of one counted.
    pub micro_batches: usize,
}

impl HeldBlocks {
    /// All of a model of so many blocks, and one micro-batch.
    pub fn all(layers: usize) -> HeldBlocks {
        HeldBlocks {
            layers: 0..layers,
            micro_batches: 1,
        }
    }
}

const HAS_OWN: &str = "a rank has tables of its blocks";

/// The activations of one micro-batch, of some neighbouring blocks and the input of what follows.
struct Table {
    /// The first block.
    first: usize,
    layers: Vec<Vec<Slot>>,
    host: HostPlaces,
    /// None if the model's routers have no loss of balance.
    balance: Option<Balance>,
    /// None if the model multiplies nothing in FP8.
    fp8_cells: Option<Fp8Cells>,
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

impl Table {
    fn lease(
        memory: &Memory,
        (first, layers): (usize, &[BlockActions]),
        (dtype, batch): (DType, BatchShape),
        (balance, fp8_cells): (Option<Balance>, Option<Fp8Cells>),
    ) -> Result<Table, OutOfMemory> {
        let numbered = (first..).zip(layers);
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
        let slot = |(activation, extent, action): &(Activation, Extent, Action)| Slot {
            activation: *activation,
            extent: *extent,
            action: *action,
            state: SlotState::Absent,
        };
        let slots = |table: &Vec<_>| table.iter().map(slot).collect();
        Ok(Table {
            first,
            layers: layers.iter().map(slots).collect(),
            host,
            balance,
            fp8_cells,
        })
    }

    /// The number of a block's row; none if the table does not have the block.
    fn row(&self, layer: usize) -> Option<usize> {
        let row = layer.checked_sub(self.first)?;
        (row < self.layers.len()).then_some(row)
    }

    /// Whether a block is among its own, and not what follows.
    fn has(&self, layer: usize) -> bool {
        self.row(layer)
            .is_some_and(|row| row + 1 < self.layers.len())
    }

    fn slot(&self, at: LayerActivation) -> &Slot {
        let mut slots = self.of_layer(at.layer).iter();
        let slot = slots.find(|slot| slot.activation == at.activation);
        slot.unwrap_or_else(|| panic!("there is no {at}"))
    }

    fn of_layer(&self, layer: usize) -> &[Slot] {
        self.row(layer).map_or(&[], |row| &self.layers[row])
    }

    fn of_layer_mut(&mut self, layer: usize) -> &mut [Slot] {
        match self.row(layer) {
            Some(row) => &mut self.layers[row],
            None => &mut [],
        }
    }
}

impl SavedActivations {
    /// No table yet.
    pub(crate) fn without_tables(
        (statistics, fp8): (Statistics, Option<Fp8State>),
        dtype: DType,
    ) -> SavedActivations {
        SavedActivations {
            tables: Vec::new(),
            current: 0,
            statistics,
            fp8,
            dtype,
        }
    }

    /// Adds an empty table for a micro-batch of this shape, with the balance of its routers where they have a loss of it, with the
    /// scales of its operands where the model multiplies in FP8, and with pinned host memory for what it offloads.
    pub(crate) fn lease_table(
        &mut self,
        memory: &Memory,
        layers: (usize, &[BlockActions]),
        batch: BatchShape,
        balance: Option<Balance>,
    ) -> Result<(), OutOfMemory> {
        let (first, rows) = layers;
        // The last row is what follows the blocks.
        let blocks = first..first + rows.len() - 1;
        let cells = || Fp8Cells::lease(memory, &blocks);
        let cells = self.fp8.is_some().then(cells).transpose()?;
        let batch = (self.dtype, batch);
        let table = Table::lease(memory, layers, batch, (balance, cells))?;
        self.tables.push(table);
        Ok(())
    }

    /// Uses another micro-batch's table from now on.
    pub fn use_table(&mut self, number: usize) {
        self.current = number;
    }

    /// The number of the `number`th of the tables that have a block.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn table_of(&self, layer: usize, number: usize) -> usize {
        let mut own = (0..self.tables.len()).filter(|table| self.tables[*table].has(layer));
        let table = own.nth(number);
        table.unwrap_or_else(|| panic!("there is no table {number} of block {layer}"))
    }

    /// The number of the table in use.
    pub(crate) fn table_in_use(&self) -> usize {
        self.current
    }

    /// The balance of the table's routers; none if they have no loss of balance.
    pub(crate) fn balance_mut(&mut self) -> Option<&mut Balance> {
        self.tables[self.current].balance.as_mut()
    }

    /// As [`SavedActivations::balance_mut`].
    pub(crate) fn balance(&self) -> Option<&Balance> {
        self.table().balance.as_ref()
    }

    /// Starts the stages' counts afresh.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn begin_step(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        self.statistics.begin_step();
        let fp8 = self.fp8.as_mut();
        fp8.map_or(Ok(()), |fp8| fp8.begin_step(kernels))
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
        self.table().slot(at)
    }

    /// The slot of an activation, to be changed.
    pub(crate) fn slot_mut(&mut self, at: LayerActivation) -> &mut Slot {
        let mut slots = self.tables[self.current].of_layer_mut(at.layer).iter_mut();
        let slot = slots.find(|slot| slot.activation == at.activation);
        slot.unwrap_or_else(|| panic!("there is no {at}"))
    }

    fn state(&self, at: LayerActivation) -> &SlotState {
        &self.slot(at).state
    }

    fn table(&self) -> &Table {
        &self.tables[self.current]
    }

    /// The places on the host of what the table offloads.
    pub(crate) fn host(&mut self) -> &mut HostPlaces {
        &mut self.tables[self.current].host
    }

    /// Whether activations of any micro-batch may wait on the host.
    pub(crate) fn is_offloading(&self) -> bool {
        self.tables.iter().any(|table| !table.host.is_empty())
    }

    /// All slots of a block.
    pub(crate) fn block(&mut self, layer: usize) -> &mut [Slot] {
        self.tables[self.current].of_layer_mut(layer)
    }

    /// Whether the activation is neither in device memory nor on the host.
    pub(crate) fn is_absent(&self, at: LayerActivation) -> bool {
        matches!(self.state(at), SlotState::Absent)
    }

    /// Whether the activation is on the host alone. Activations of tiles never are.
    pub(crate) fn is_away(&self, at: LayerActivation) -> bool {
        let slot =
            |slot: &Slot| slot.activation == at.activation && matches!(slot.state, SlotState::Away);
        self.table().of_layer(at.layer).iter().any(slot)
    }

    /// The activation, if it is live.
    pub(crate) fn get(&self, at: LayerActivation) -> Option<&Rc<Buffer>> {
        match self.state(at) {
            SlotState::Live(buffer) => Some(buffer),
            _ => None,
        }
    }

    /// Leases room for the input of a block, `[b s, h]`, that another rank computes.
    ///
    /// # Errors
    /// [`OutOfMemory`] if it is refused.
    pub fn lease_input(
        &self,
        memory: &Memory,
        layer: usize,
        batch: BatchShape,
        keeps: bool,
    ) -> Result<Buffer, OutOfMemory> {
        let at = LayerActivation::input_of(layer);
        let table = self.tables.iter().find(|table| table.has(layer));
        let slot = table.expect(HAS_OWN).slot(at);
        let (dims, dtype) = slot.extent.resolve(batch, self.dtype);
        let category = match keeps && slot.action != Action::Recompute {
            true => Category::Activation,
            false => Category::Temporary,
        };
        memory.lease(category, at.activation.name(), dims, dtype)
    }

    /// Files the input of a block, which another rank computed.
    pub fn receive(&mut self, layer: usize, input: Buffer) {
        self.put(LayerActivation::input_of(layer), input);
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

    /// Removes an activation from the table that so many deferred gradients are still computed from: they keep its memory.
    ///
    /// # Panics
    /// As [`SavedActivations::release`], if anybody else reads it.
    pub(crate) fn release_deferred(&mut self, at: LayerActivation, readers: usize) {
        if readers == 0 {
            return self.release(at);
        }
        let state = std::mem::take(&mut self.slot_mut(at).state);
        let is_theirs = |buffer: &Rc<Buffer>| Rc::strong_count(buffer) == 1 + readers;
        assert!(
            matches!(&state, SlotState::Live(buffer) if is_theirs(buffer)),
            "{at} leaves the table when it is live and nobody else reads it"
        );
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

    /// Drops everything, of all micro-batches. No copy may be under way.
    pub(crate) fn clear(&mut self) {
        let tables = self.tables.iter_mut();
        let slots = tables.flat_map(|table| table.layers.iter_mut().flatten());
        slots.for_each(|slot| slot.state = SlotState::Absent);
    }

    /// Whether the table holds no activation.
    pub fn is_empty(&self) -> bool {
        let mut slots = self.table().layers.iter().flatten();
        slots.all(|slot| matches!(slot.state, SlotState::Absent))
    }
}
