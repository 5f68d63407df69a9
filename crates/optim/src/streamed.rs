//! Updates in chunks: states, gradients and weights that live elsewhere come to the device for their update, and go
//! back.
//!
//! A chunk is a range of one unit's matrices, or this rank's pieces of tensors that ranks update together. Its states
//! and gradients that live elsewhere are uploaded into a slot and updated there. States are then downloaded. Each of
//! these has its own queue, so that copies both ways and updates run beside one another and beside the computation. A
//! chunk's weights are already on the device: the caller that updates a unit brings them. Six waits order this, and
//! each is needed; states in a file need those of [`crate::disk`] too:
//!
//! | who waits | for what | otherwise |
//! |---|---|---|
//! | the updates | the computation so far, once an update or a released unit ([`FINAL`]) | they read gradients, and write weights, too early |
//! | the upload of gradients | their download, once an update ([`GRADIENTS_LEFT`]) | it sends those of an earlier step |
//! | the upload | the slot's last download ([`LEFT`]) | it writes over states that are being sent |
//! | the update | the chunk's upload ([`CAME`]) | it reads what was in the slot before |
//! | the download | the chunk's update ([`UPDATED`]) | it sends states and weights as they were |
//! | the computation, once a unit | the unit's last update ([`WRITTEN`]) | it reads weights as they were, and writes over gradients |
//!
//! No other wait is needed. Slots are used in turn, and queues keep their order, so a chunk's last download is over
//! before it is uploaded again: its slot, or one used later, has been emptied by then. The next gradients are written
//! after the forward pass, in which the computation has waited for every update.

use crate::chunks::{Chunk, Chunks};
use crate::disk::DiskStore;
use crate::form::Form;
use crate::rule::UpdateQueue;
use crate::sources::{FetchedChunk, Sources};
use crate::store::{PinnedStore, Store};
use crate::tensor_states::TensorStates;
use crate::update::{SCRATCH, room_bytes, update};
use kernels::{BlockFile, Event, Kernels, Queue, Result};
use memory::{Buffer, Category, DType, Home, Homes, Layout, Memory, Out, OutOfMemory, Rank};
use std::rc::Rc;
use std::sync::Arc;
use units::{Gradients, Weights};

const FINAL: &str = "gradients are final before states are updated";
const GRADIENTS_LEFT: &str = "gradients are on the host before chunks bring them";
const LEFT: &str = "states have left a slot before others come";
const CAME: &str = "states have come before they are updated";
const UPDATED: &str = "states are updated before they go back";
const WRITTEN: &str = "weights are written before they are read";

/// The chunks of a run, and the progress of their updates.
pub(crate) struct Streamed {
    chunks: Chunks,
    /// States that live elsewhere than on the device.
    store: Option<Box<dyn Store>>,
    /// Empty if chunks bring nothing to the device.
    slots: Vec<Slot>,
    /// Whether gradients come from the host.
    brings_gradients: bool,
    /// Numbers of chunks since the beginning: fetched into host memory, brought onto the device, updated, and waited
    /// for by the computation. Each counts what has been enqueued.
    fetched: usize,
    brought: usize,
    updated: usize,
    awaited: usize,
    /// Scratch for updates of whole tensors.
    room: Option<Buffer>,
    /// An event after each chunk's latest update.
    updates: Vec<Event>,
    /// Number of chunks that may come to the device, up to the end of the current or next update.
    due: usize,
}

/// Device memory for a chunk.
struct Slot {
    bytes: Buffer,
    filled: Event,
    emptied: Event,
}

impl Slot {
    /// Memory in the slot for a chunk's states, and for its gradients.
    fn halves(&mut self, chunk: &Chunk) -> (Out<'_>, Out<'_>) {
        let (states, gradients) = self.bytes.view_mut().split_at(chunk.state_bytes());
        (states, gradients.rows(0..chunk.gradient_bytes))
    }

    /// The states and gradients of the chunk in this slot.
    fn fetched<'a>(&'a mut self, chunk: &'a Chunk) -> FetchedChunk<'a> {
        let (states, gradients) = self.halves(chunk);
        FetchedChunk {
            chunk,
            states,
            gradients: gradients.into_in(),
        }
    }
}

impl Streamed {
    /// Leases the store for states that live elsewhere, and slots on the device.
    pub(crate) fn lease(
        memory: &Memory,
        layout: &Layout,
        homes: &Homes,
        (form, gradients): (&Rc<Form>, DType),
        rank: Rank,
    ) -> Result<Streamed, OutOfMemory> {
        let chunks = Chunks::new(layout, homes, (form, gradients), rank);
        let slot_bytes = chunks.all.iter().map(Chunk::slot_bytes).max().unwrap_or(0);
        let slots = match slot_bytes {
            0 => 0,
            _ => homes.chunk_slots.clamp(1, chunks.all.len()),
        };
        let slot = |_| {
            let (category, dims) = (Category::OptimizerState, [slot_bytes]);
            Ok(Slot {
                bytes: memory.lease_persistent(category, "offload_slot", dims, DType::U8)?,
                filled: Event::PAST,
                emptied: Event::PAST,
            })
        };
        let store = (chunks.away > 0).then(|| lease_store(memory, &chunks, homes));
        let all = chunks.all.iter();
        let rooms = all.map(|chunk| room_bytes(form, &chunk.round, rank));
        let room_bytes = rooms.max().unwrap_or(0);
        let room = (room_bytes > 0).then(|| {
            memory.lease_persistent(Category::OptimizerState, SCRATCH, [room_bytes], DType::U8)
        });
        Ok(Streamed {
            room: room.transpose()?,
            store: store.transpose()?,
            updates: vec![Event::PAST; chunks.all.len()],
            slots: (0..slots).map(slot).collect::<Result<_, OutOfMemory>>()?,
            chunks,
            brings_gradients: homes.gradients == Home::Pinned,
            fetched: 0,
            brought: 0,
            updated: 0,
            awaited: 0,
            due: 0,
        })
    }

    /// The chunks of the run.
    pub(crate) fn chunks(&self) -> &Chunks {
        &self.chunks
    }

    /// The store of states that live elsewhere, for reading between updates.
    pub(crate) fn store(&self) -> Option<&dyn Store> {
        self.store.as_deref()
    }

    /// The store for writing between updates, and the chunks. All chunks are stored then. If an aborted step had fetched chunks ahead, they
    /// are fetched again.
    pub(crate) fn at_rest(
        &mut self,
        kernels: &Kernels,
    ) -> Result<(&Chunks, Option<&mut (dyn Store + 'static)>)> {
        for queue in [Queue::DiskRead, Queue::Upload] {
            kernels.finish(kernels.record(queue)?)?;
        }
        (self.fetched, self.brought) = (self.updated, self.updated);
        if let Some(store) = &self.store {
            store.finish(kernels)?;
        }
        Ok((&self.chunks, self.store.as_deref_mut()))
    }

    /// Takes a file for states on a disk. Call it before anything else.
    pub(crate) fn use_file(&mut self, file: Arc<dyn BlockFile>) {
        if let Some(store) = &mut self.store {
            store.use_file(file);
        }
    }

    /// Bytes of the slots on the device.
    pub(crate) fn slot_bytes(&self) -> u64 {
        self.slots.iter().map(|slot| slot.bytes.bytes()).sum()
    }

    /// Enqueues the fetches of the next update's first chunks.
    pub(crate) fn prefetch(&mut self, kernels: &Kernels) -> Result {
        if let Some(store) = &mut self.store {
            store.end_host_access()?;
        }
        let all = self.chunks.all.len();
        self.due = (self.updated / all.max(1) + 1) * all;
        self.advance(kernels, None)
    }

    /// Begins an update. The computation has been given all gradients and numbers.
    pub(crate) fn begin(&mut self, kernels: &Kernels, gradients: &Gradients) -> Result {
        let asked = kernels.record(Queue::Compute)?;
        kernels.wait(Queue::Update, asked, FINAL)?;
        if self.brings_gradients {
            let left = kernels.record(Queue::Download)?;
            kernels.wait(Queue::Upload, left, GRADIENTS_LEFT)?;
        }
        self.prefetch(kernels)?;
        self.advance(kernels, Some(gradients))
    }

    /// Begins the update of a unit. The computation has been given its gradients.
    pub(crate) fn begin_unit(&mut self, kernels: &Kernels) -> Result {
        let asked = kernels.record(Queue::Compute)?;
        kernels.wait(Queue::Update, asked, FINAL)
    }

    /// Enqueues the updates of the remaining chunks up to the end of a unit, or of all.
    pub(crate) fn update_to(
        &mut self,
        kernels: &Kernels,
        (mut sources, tensor_states): (Sources, &mut TensorStates),
        unit: Option<usize>,
    ) -> Result {
        let end = self.end_of(unit);
        while self.updated < end {
            self.update_chunk(kernels, &mut sources, tensor_states)?;
            self.advance(kernels, Some(sources.gradients))?;
        }
        Ok(())
    }

    /// Makes the computation wait for the updates, already enqueued, of the chunks up to the end of a unit, or of all.
    pub(crate) fn wait_for(&mut self, kernels: &Kernels, unit: Option<usize>) -> Result {
        let end = self.end_of(unit);
        assert!(end <= self.updated, "the unit's update has been asked for");
        if self.awaited < end {
            let mut updates =
                (self.awaited..end).map(|number| self.updates[number % self.updates.len()]);
            // The queue of updates keeps its order, so its last event is enough. The computation need not wait for its
            // own updates.
            if let Some(last) = updates.rfind(|update| update.queue == Queue::Update) {
                kernels.wait(Queue::Compute, last, WRITTEN)?;
            }
            self.awaited = end;
        }
        Ok(())
    }

    /// The place of a unit in the order of updates.
    pub(crate) fn place_of(&self, unit: usize) -> usize {
        let number = self
            .chunks
            .unit_ends
            .iter()
            .position(|(own, _)| *own == unit);
        number.expect("all units are updated")
    }

    /// The unit that was updated last, unless the computation already waits for it.
    pub(crate) fn under_way(&self) -> Option<usize> {
        (self.awaited < self.updated).then(|| self.chunks.at(self.updated - 1).unit)
    }

    /// Whether every chunk is updated before what the computation does next.
    pub(crate) fn is_updated(&self) -> bool {
        self.awaited == self.due
    }

    /// The number of chunks up to the end of a unit, or of all. For a unit without chunks, the number of updated ones.
    fn end_of(&self, unit: Option<usize>) -> usize {
        let mut ends = self.chunks.unit_ends.iter();
        let end = match unit {
            None => Some(self.chunks.all.len()),
            Some(unit) => ends.find(|(own, _)| *own == unit).map(|(_, end)| *end),
        };
        end.map_or(self.awaited, |end| self.due - self.chunks.all.len() + end)
    }

    /// Enqueues the uploads of chunks, as far as slots have room. Gradients can come only when they are final.
    fn advance(&mut self, kernels: &Kernels, gradients: Option<&Gradients>) -> Result {
        let ahead = self.store.as_ref().map_or(0, |store| store.ahead());
        while self.fetched < self.due.min(self.updated + self.slots.len() + ahead) {
            self.fetch(kernels)?;
        }
        if self.brings_gradients && gradients.is_none() {
            return Ok(());
        }
        while self.brought < self.due.min(self.updated + self.slots.len()) {
            self.bring(kernels, gradients)?;
        }
        Ok(())
    }

    /// Enqueues the fetch of the next chunk's states into host memory.
    fn fetch(&mut self, kernels: &Kernels) -> Result {
        let turn = self.chunks.turn(self.fetched);
        let away = &self.chunks.at(self.fetched).away;
        if let (Some(away), Some(store)) = (away, &mut self.store) {
            store.fetch(kernels, turn, &away.place)?;
        }
        self.fetched += 1;
        Ok(())
    }

    /// Enqueues the uploads that the next chunk needs.
    fn bring(&mut self, kernels: &Kernels, gradients: Option<&Gradients>) -> Result {
        let turn = self.chunks.turn(self.brought);
        let chunk = self.chunks.at(self.brought);
        let slots = self.slots.len().max(1);
        if let Some(slot) = self.slots.get_mut(self.brought % slots) {
            kernels.wait(Queue::Upload, slot.emptied, LEFT)?;
            if let (Some(away), Some(store)) = (&chunk.away, &mut self.store) {
                store.fetched(kernels, turn)?;
                let (to, from) = (slot.halves(chunk).0, store.on_host(turn, &away.place));
                // SAFETY: both live as long as the optimizer, and kernels are dropped with all their work before it
                // (`Optimizer::lease`). The slot is read after `filled`, and a later download writes the host's copy.
                unsafe { kernels.start_upload(to, from.as_in()) }?;
            }
            for range in &chunk.ranges {
                if let Some(from) = gradients.and_then(|gradients| gradients.on_host(range)) {
                    let to = slot.halves(chunk).1.cast(from.dtype());
                    let to = to.rows(chunk.rows(range));
                    // SAFETY: as above. The host's copy is written after the next forward pass, which waits for
                    // `WRITTEN`.
                    unsafe { kernels.start_upload(to, from) }?;
                }
            }
            slot.filled = kernels.record(Queue::Upload)?;
        }
        self.brought += 1;
        Ok(())
    }

    /// Enqueues the next chunk's update, and the download of what it wrote.
    fn update_chunk(
        &mut self,
        kernels: &Kernels,
        sources: &mut Sources,
        tensor_states: &mut TensorStates,
    ) -> Result {
        let number = self.updated;
        let chunk = self.chunks.at(number);
        let queue = queue(chunk);
        if self.chunks.begins_run(number, self::queue) {
            sources.weights.ready(kernels, queue, chunk.unit)?;
        }
        let slots = self.slots.len().max(1);
        let slot = self.slots.get_mut(number % slots);
        if let Some(slot) = &slot {
            kernels.wait(queue, slot.filled, CAME)?;
        }
        let room = self.room.as_mut().map(Buffer::view_mut);
        let fetched = slot.map(|slot| slot.fetched(chunk));
        // SAFETY: the caller keeps weights and gradients, and the rest lives as long as the optimizer. The computation
        // uses the weights after `WRITTEN`, and the gradients after the last such wait.
        let operations = unsafe { UpdateQueue::new(kernels, queue) };
        update(
            &operations,
            &chunk.round,
            &mut sources.with(fetched),
            tensor_states,
            room,
        )?;
        let updated = kernels.record(queue)?;
        self.updates[number % self.chunks.all.len()] = updated;
        if !self.slots.is_empty() || sources.weights.is_on_host() {
            kernels.wait(Queue::Download, updated, UPDATED)?;
            self.send_back(kernels, sources.weights)?;
        }
        self.updated += 1;
        Ok(())
    }

    /// Enqueues the download of what a chunk's update wrote.
    fn send_back(&mut self, kernels: &Kernels, weights: &mut Weights) -> Result {
        let turn = self.chunks.turn(self.updated);
        let chunk = self.chunks.at(self.updated);
        for range in &chunk.ranges {
            weights.updated(kernels, range)?;
        }
        let slots = self.slots.len().max(1);
        let Some(slot) = self.slots.get_mut(self.updated % slots) else {
            return Ok(());
        };
        if let (Some(away), Some(store)) = (&chunk.away, &mut self.store) {
            let from = slot.halves(chunk).0;
            // SAFETY: as in `bring`. The slot is written again after `emptied`.
            unsafe { kernels.start_download(store.on_host(turn, &away.place), from.as_in()) }?;
            store.put_back(kernels, turn, &away.place)?;
        }
        slot.emptied = kernels.record(Queue::Download)?;
        Ok(())
    }
}

/// Leases host memory of the home of states.
fn lease_store(
    memory: &Memory,
    chunks: &Chunks,
    homes: &Homes,
) -> Result<Box<dyn Store>, OutOfMemory> {
    Ok(match homes.states {
        Home::Disk(_) => Box::new(DiskStore::lease(memory, chunks, homes.chunk_slots)?),
        _ => Box::new(PinnedStore::lease(memory, chunks)?),
    })
}

/// The queue of a chunk's update. Whole tensors share one scratch and may run matrix products, so they are updated in
/// the queue of the computation, one after the other.
fn queue(chunk: &Chunk) -> Queue {
    match chunk.round[0].whole {
        Some(_) => Queue::Compute,
        None => Queue::Update,
    }
}
