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
//! No other wait is needed. A chunk has the same slot in every update, so its last download is over before it is uploaded again.
//! The next gradients are written after the forward pass, in which the computation has waited for every update.

use crate::chunks::{Chunk, Chunks};
use crate::disk::DiskStore;
use crate::form::Form;
use crate::round::{SCRATCH, room_bytes, update};
use crate::sources::{FetchedChunk, Sources};
use crate::store::{PinnedStore, Store};
use crate::update::UpdateQueue;
use kernels::{Event, Kernels, Queue, Result};
use memory::{Buffer, Category, DType, Home, Homes, Layout, Memory, Out, OutOfMemory, Rank};
use units::{Gradients, Weights};

const FINAL: &str = "gradients are final before states are updated";
const GRADIENTS_LEFT: &str = "gradients are on the host before chunks bring them";
const LEFT: &str = "states have left a slot before others come";
const CAME: &str = "states have come before they are updated";
const UPDATED: &str = "states are updated before they go back";
const WRITTEN: &str = "weights are written before they are read";

/// The chunks of a run, and the progress of their updates.
pub(crate) struct Streamed {
    pub(crate) chunks: Chunks,
    /// The home of states that live elsewhere than on the device.
    pub(crate) store: Option<Box<dyn Store>>,
    /// Empty if chunks bring nothing to the device.
    slots: Vec<Slot>,
    /// Whether gradients come from the host.
    brings_gradients: bool,
    /// Numbers of this update's chunks: fetched into host memory, brought onto the device, updated, and waited for by the computation.
    /// Each counts what has been enqueued. All are 0 once an update is over.
    fetched: usize,
    brought: usize,
    updated: usize,
    awaited: usize,
    /// Number of chunks that may come to the device: all once an update begins, and none before.
    due: usize,
    /// Scratch for updates of whole tensors.
    room: Option<Buffer>,
    /// An event after each chunk's latest update.
    updates: Vec<Event>,
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
}

impl Streamed {
    /// Leases the store for states that live elsewhere, and slots on the device.
    pub(crate) fn lease(
        memory: &Memory,
        layout: &Layout,
        homes: &Homes,
        (form, gradients): (&Form, DType),
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
        let store: Option<Box<dyn Store>> = match homes.states {
            _ if chunks.away == 0 => None,
            Home::Disk(_) => {
                let store = DiskStore::lease(memory, &chunks, homes.chunk_slots)?;
                Some(Box::new(store))
            }
            _ => Some(Box::new(PinnedStore::lease(memory, &chunks)?)),
        };
        let rounds = chunks.all.iter().map(|chunk| &chunk.round);
        let room_bytes = room_bytes(form, rounds, rank);
        let room = (room_bytes > 0).then(|| {
            memory.lease_persistent(Category::OptimizerState, SCRATCH, [room_bytes], DType::U8)
        });
        Ok(Streamed {
            room: room.transpose()?,
            store,
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

    /// Comes before the host writes states between updates. All chunks are stored then. If an aborted step had fetched chunks ahead, they
    /// are fetched again.
    pub(crate) fn rest(&mut self, kernels: &Kernels) -> Result {
        for queue in [Queue::DiskRead, Queue::Upload] {
            kernels.finish(kernels.record(queue)?)?;
        }
        (self.fetched, self.brought) = (self.updated, self.updated);
        let store = self.store.as_ref();
        store.map_or(Ok(()), |store| store.finish(kernels))
    }

    /// Name and bytes of the slots on the device.
    pub(crate) fn slots_arena(&self) -> (&'static str, u64) {
        let bytes = self.slots.iter().map(|slot| slot.bytes.bytes());
        ("offload_slots", bytes.sum())
    }

    /// Enqueues the fetches of the next update's first chunks.
    pub(crate) fn prefetch(&mut self, kernels: &Kernels) -> Result {
        if let Some(store) = &mut self.store {
            store.end_host_access()?;
        }
        self.due = self.chunks.all.len();
        self.advance(kernels, None)
    }

    /// Begins an update. The computation has been given all gradients and numbers.
    pub(crate) fn begin(&mut self, kernels: &Kernels, gradients: &Gradients) -> Result {
        self.begin_unit(kernels)?;
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
        mut sources: Sources,
        unit: Option<usize>,
    ) -> Result {
        let end = self.end_of(unit);
        while self.updated < end {
            self.update_chunk(kernels, &mut sources)?;
            self.advance(kernels, Some(sources.gradients))?;
        }
        Ok(())
    }

    /// Makes the computation wait for the updates, already enqueued, of the chunks up to the end of a unit, or of all.
    pub(crate) fn wait_for(&mut self, kernels: &Kernels, unit: Option<usize>) -> Result {
        let end = self.end_of(unit);
        assert!(end <= self.updated, "the unit's update has been asked for");
        if self.awaited < end {
            let mut updates = self.updates[self.awaited..end].iter();
            // The queue of updates keeps its order, so its last event is enough. The computation need not wait for its
            // own updates.
            if let Some(last) = updates.rfind(|update| update.queue == Queue::Update) {
                kernels.wait(Queue::Compute, *last, WRITTEN)?;
            }
            self.awaited = end;
        }
        if self.is_updated() {
            (self.fetched, self.brought) = (0, 0);
            (self.updated, self.awaited, self.due) = (0, 0, 0);
        }
        Ok(())
    }

    /// The place of a unit in the order of updates.
    pub(crate) fn place_of(&self, unit: usize) -> usize {
        let mut units = self.chunks.unit_ends.iter();
        let number = units.position(|(own, _)| *own == unit);
        number.expect("all units are updated")
    }

    /// The unit that was updated last, unless the computation already waits for it.
    pub(crate) fn under_way(&self) -> Option<usize> {
        (self.awaited < self.updated).then(|| self.chunks.all[self.updated - 1].unit)
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
        end.map_or(self.awaited, |end| end.min(self.due))
    }

    /// Enqueues the uploads of chunks, as far as slots have room. Gradients can come only when they are final.
    fn advance(&mut self, kernels: &Kernels, gradients: Option<&Gradients>) -> Result {
        let ahead = self.store.as_ref().map_or(0, |store| store.ahead());
        while self.fetched < self.due.min(self.updated + self.slots.len() + ahead) {
            let away = &self.chunks.all[self.fetched].away;
            if let (Some(away), Some(store)) = (away, &mut self.store) {
                store.fetch(kernels, away)?;
            }
            self.fetched += 1;
        }
        if self.brings_gradients && gradients.is_none() {
            return Ok(());
        }
        while self.brought < self.due.min(self.updated + self.slots.len()) {
            self.bring(kernels, gradients)?;
        }
        Ok(())
    }

    /// Enqueues the uploads that the next chunk needs.
    fn bring(&mut self, kernels: &Kernels, gradients: Option<&Gradients>) -> Result {
        let chunk = &self.chunks.all[self.brought];
        if let Some(slot) = slot_of(&mut self.slots, self.brought) {
            kernels.wait(Queue::Upload, slot.emptied, LEFT)?;
            if let (Some(away), Some(store)) = (&chunk.away, &mut self.store) {
                store.fetched(kernels, away)?;
                let (to, from) = (slot.halves(chunk).0, store.on_host(away));
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
    fn update_chunk(&mut self, kernels: &Kernels, sources: &mut Sources) -> Result {
        let number = self.updated;
        let chunk = &self.chunks.all[number];
        let queue = queue(chunk);
        let before = number.checked_sub(1).map(|before| &self.chunks.all[before]);
        if before.is_none_or(|before| (before.unit, self::queue(before)) != (chunk.unit, queue)) {
            sources.weights.ready(kernels, queue, chunk.unit)?;
        }
        let slot = slot_of(&mut self.slots, number);
        if let Some(slot) = &slot {
            kernels.wait(queue, slot.filled, CAME)?;
        }
        let room = self.room.as_mut().map(Buffer::view_mut);
        let fetched = slot.map(|slot| {
            let (states, gradients) = slot.halves(chunk);
            FetchedChunk {
                chunk,
                states,
                gradients: gradients.into_in(),
            }
        });
        // SAFETY: the caller keeps weights and gradients, and the rest lives as long as the optimizer. The computation
        // uses the weights after `WRITTEN`, and the gradients after the last such wait.
        let operations = unsafe { UpdateQueue::new(kernels, queue) };
        let mut sources_of_chunk = sources.with(fetched);
        update(&operations, &chunk.round, &mut sources_of_chunk, room)?;
        let updated = kernels.record(queue)?;
        self.updates[number] = updated;
        if !self.slots.is_empty() || sources.weights.is_on_host() {
            kernels.wait(Queue::Download, updated, UPDATED)?;
            self.send_back(kernels, sources.weights)?;
        }
        self.updated += 1;
        Ok(())
    }

    /// Enqueues the download of what a chunk's update wrote.
    fn send_back(&mut self, kernels: &Kernels, weights: &mut Weights) -> Result {
        let chunk = &self.chunks.all[self.updated];
        for range in &chunk.ranges {
            weights.updated(kernels, range)?;
        }
        let Some(slot) = slot_of(&mut self.slots, self.updated) else {
            return Ok(());
        };
        if let (Some(away), Some(store)) = (&chunk.away, &mut self.store) {
            let from = slot.halves(chunk).0;
            // SAFETY: as in `bring`. The slot is written again after `emptied`.
            unsafe { kernels.start_download(store.on_host(away), from.as_in()) }?;
            store.put_back(kernels, away)?;
        }
        slot.emptied = kernels.record(Queue::Download)?;
        Ok(())
    }
}

/// The slot of a chunk; none if chunks bring nothing to the device.
fn slot_of(slots: &mut [Slot], number: usize) -> Option<&mut Slot> {
    let index = number.checked_rem(slots.len())?;
    Some(&mut slots[index])
}

/// The queue of a chunk's update. Whole tensors share one scratch and may run matrix products, so they are updated in
/// the queue of the computation, one after the other.
fn queue(chunk: &Chunk) -> Queue {
    match chunk.round[0].whole {
        Some(_) => Queue::Compute,
        None => Queue::Update,
    }
}
