//! Updates in chunks: what is not on the device comes to it for its update, and goes back.
//!
//! A chunk is a range of one part's matrices, or what this rank has of tensors that ranks update together. What of its states
//! and gradients is not on the device is uploaded into a slot, updated there and, but for gradients, downloaded, each in a
//! queue of its own, so that copies each way and updates run beside one another and beside the computation. Its weights are
//! on the device by then: whoever asks for a part's update sees to that. Six waits order this, and each is needed; states in
//! a file need those of [`crate::disk`] too:
//!
//! | who waits | for what | otherwise |
//! |---|---|---|
//! | the updates | the computation so far, once an update or a released part ([`FINAL`]) | they read gradients, and write weights, too early |
//! | the upload of gradients | their download, once an update ([`GRADIENTS_LEFT`]) | it sends those of an earlier step |
//! | the upload | the slot's last download ([`LEFT`]) | it writes over states that are being sent |
//! | the update | the chunk's upload ([`CAME`]) | it reads what was in the slot before |
//! | the download | the chunk's update ([`UPDATED`]) | it sends states and weights as they were |
//! | the computation, once a part | the part's last update ([`WRITTEN`]) | it reads weights as they were, and writes over gradients |
//!
//! No more are. Slots are used in turn, and queues keep their order, so a chunk's last download is over before it is
//! uploaded again: its slot, or one that was used later, has been emptied by then. And the next gradients are written
//! after the forward pass, in which the computation has waited for every update.

use crate::chunks::{Chunk, Chunks};
use crate::form::Form;
use crate::rule::Asking;
use crate::sources::{Came, Sources};
use crate::store::Store;
use crate::tensor_states::TensorStates;
use crate::update::{SCRATCH, room_bytes, update};
use kernels::{BlockFile, Event, KernelError, Kernels, Queue};
use memory::{Buffer, Category, DType, Home, Homes, Layer, Layout, Memory, Out, OutOfMemory, Rank};
use std::rc::Rc;
use std::sync::Arc;
use units::{Gradients, Weights};

const FINAL: &str = "gradients are final before states are updated";
const GRADIENTS_LEFT: &str = "gradients are on the host before chunks bring them";
const LEFT: &str = "states have left a slot before others come";
const CAME: &str = "states have come before they are updated";
const UPDATED: &str = "states are updated before they go back";
const WRITTEN: &str = "weights are written before they are read";

/// What is updated in chunks, and where its updates are.
pub(crate) struct Streamed {
    chunks: Chunks,
    /// States that are not on the device.
    store: Option<Store>,
    /// None where chunks bring nothing.
    slots: Vec<Slot>,
    /// Whether gradients come from the host.
    brings_gradients: bool,
    /// Since the beginning, chunks that were asked to come into host memory, and onto the device; those whose update was
    /// asked for; and those of them that the computation was told to wait for.
    fetched: usize,
    brought: usize,
    updated: usize,
    awaited: usize,
    /// Scratch for the updates of chunks that are whole tensors.
    room: Option<Buffer>,
    /// When each chunk's last update that was asked for is over.
    updates: Vec<Event>,
    /// Chunks that may come: those of the update that is under way or next.
    due: usize,
}

/// Device memory for a chunk.
struct Slot {
    bytes: Buffer,
    filled: Event,
    emptied: Event,
}

impl Slot {
    /// Room for a chunk's states, and for its gradients.
    fn halves(&mut self, chunk: &Chunk) -> (Out<'_>, Out<'_>) {
        let (states, gradients) = self.bytes.view_mut().split_at(chunk.state_bytes());
        (states, gradients.rows(0..chunk.gradient_bytes))
    }

    /// The states and gradients of the chunk that it holds.
    fn came<'a>(&'a mut self, chunk: &'a Chunk) -> Came<'a> {
        let (states, gradients) = self.halves(chunk);
        Came {
            chunk,
            states,
            gradients: gradients.into_in(),
        }
    }
}

impl Streamed {
    /// Leases room for states that are not on the device, and slots on it.
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
        let store = (chunks.away > 0).then(|| Store::lease(memory, &chunks, homes));
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

    /// Which chunks there are.
    pub(crate) fn chunks(&self) -> &Chunks {
        &self.chunks
    }

    /// The states that are not on the device, for reading between updates.
    pub(crate) fn store(&self) -> Option<&Store> {
        self.store.as_ref()
    }

    /// The same for writing, with the chunks, between updates. What was fetched ahead for a step that was broken off is
    /// fetched again.
    pub(crate) fn at_rest(
        &mut self,
        kernels: &Kernels,
    ) -> Result<(&Chunks, Option<&mut Store>), KernelError> {
        for queue in [Queue::DiskRead, Queue::Upload] {
            kernels.finish(kernels.record(queue)?)?;
        }
        (self.fetched, self.brought) = (self.updated, self.updated);
        Ok((&self.chunks, self.store.as_mut()))
    }

    /// Takes a file for states that are to be on a disk, before anything else.
    pub(crate) fn use_file(&mut self, file: Arc<dyn BlockFile>) {
        if let Some(store) = &mut self.store {
            store.use_file(file);
        }
    }

    /// Bytes of the slots on the device.
    pub(crate) fn slot_bytes(&self) -> u64 {
        self.slots.iter().map(|slot| slot.bytes.bytes()).sum()
    }

    /// Asks for the first chunks of the next update.
    pub(crate) fn prefetch(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        if let Some(store) = &mut self.store {
            store.end_host_access()?;
        }
        let all = self.chunks.all.len();
        self.due = (self.updated / all.max(1) + 1) * all;
        self.advance(kernels, None)
    }

    /// Begins an update with gradients and numbers that the computation has been asked for.
    pub(crate) fn begin(
        &mut self,
        kernels: &Kernels,
        gradients: &Gradients,
    ) -> Result<(), KernelError> {
        let asked = kernels.record(Queue::Compute)?;
        kernels.wait(Queue::Update, asked, FINAL)?;
        if self.brings_gradients {
            let left = kernels.record(Queue::Download)?;
            kernels.wait(Queue::Upload, left, GRADIENTS_LEFT)?;
        }
        self.prefetch(kernels)?;
        self.advance(kernels, Some(gradients))
    }

    /// Begins the update of a part whose gradients the computation has been asked for.
    pub(crate) fn begin_part(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        let asked = kernels.record(Queue::Compute)?;
        kernels.wait(Queue::Update, asked, FINAL)
    }

    /// Asks for the updates of the chunks up to the end of a part, of those that have not been updated; of all for
    /// [`Layer::Whole`].
    pub(crate) fn update_part(
        &mut self,
        kernels: &Kernels,
        (mut sources, tensor_states): (Sources, &mut TensorStates),
        part: Layer,
    ) -> Result<(), KernelError> {
        let end = self.end_of(part);
        while self.updated < end {
            self.update_chunk(kernels, &mut sources, tensor_states)?;
            self.advance(kernels, Some(sources.gradients))?;
        }
        Ok(())
    }

    /// Lets the computation wait for the updates of the chunks up to the end of a part, which have been asked for.
    pub(crate) fn wait_for(&mut self, kernels: &Kernels, part: Layer) -> Result<(), KernelError> {
        let end = self.end_of(part);
        assert!(end <= self.updated, "the part's update has been asked for");
        if self.awaited < end {
            let mut updates =
                (self.awaited..end).map(|number| self.updates[number % self.updates.len()]);
            // The queue of updates keeps its order, and what was computed is there already.
            if let Some(last) = updates.rfind(|update| update.queue == Queue::Update) {
                kernels.wait(Queue::Compute, last, WRITTEN)?;
            }
            self.awaited = end;
        }
        Ok(())
    }

    /// The number of a part in the order of updates.
    pub(crate) fn number_of(&self, part: Layer) -> usize {
        let number = self
            .chunks
            .part_ends
            .iter()
            .position(|(own, _)| *own == part);
        number.expect("all parts are updated")
    }

    /// The part whose update was asked for last, unless the computation was told to wait for it.
    pub(crate) fn under_way(&self) -> Option<Layer> {
        (self.awaited < self.updated).then(|| self.chunks.at(self.updated - 1).part)
    }

    /// Whether the computation sees every chunk updated.
    pub(crate) fn is_updated(&self) -> bool {
        self.awaited == self.due
    }

    /// The number of chunks up to the end of a part; of those that have been updated for a part without any.
    fn end_of(&self, part: Layer) -> usize {
        let mut ends = self.chunks.part_ends.iter();
        let end = match part {
            Layer::Whole => Some(self.chunks.all.len()),
            _ => ends.find(|(own, _)| *own == part).map(|(_, end)| *end),
        };
        end.map_or(self.awaited, |end| self.due - self.chunks.all.len() + end)
    }

    /// Asks for chunks to come as far as there is room. Gradients can come only when they are final.
    fn advance(
        &mut self,
        kernels: &Kernels,
        gradients: Option<&Gradients>,
    ) -> Result<(), KernelError> {
        let ahead = self.store.as_ref().map_or(0, Store::ahead);
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

    /// Asks for the next chunk's states in host memory.
    fn fetch(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        let turn = self.chunks.turn(self.fetched);
        let away = &self.chunks.at(self.fetched).away;
        if let (Some(away), Some(store)) = (away, &mut self.store) {
            store.fetch(kernels, turn, away)?;
        }
        self.fetched += 1;
        Ok(())
    }

    /// Asks for what the next chunk needs to come onto the device.
    fn bring(
        &mut self,
        kernels: &Kernels,
        gradients: Option<&Gradients>,
    ) -> Result<(), KernelError> {
        let turn = self.chunks.turn(self.brought);
        let chunk = self.chunks.at(self.brought);
        let slots = self.slots.len().max(1);
        if let Some(slot) = self.slots.get_mut(self.brought % slots) {
            kernels.wait(Queue::Upload, slot.emptied, LEFT)?;
            if let (Some(away), Some(store)) = (&chunk.away, &mut self.store) {
                store.fetched(kernels, turn)?;
                let (to, from) = (slot.halves(chunk).0, store.on_host(turn, away));
                // SAFETY: both live as long as the optimizer, and kernels are dropped, with all their work, before it
                // (`Optimizer::lease`); the slot is read after `filled`, and the host's copy written by a later download.
                unsafe { kernels.start_upload(to, from.as_in()) }?;
            }
            for range in &chunk.ranges {
                if let Some(from) = gradients.and_then(|gradients| gradients.on_host(range)) {
                    let to = slot.halves(chunk).1.cast(from.dtype());
                    let to = to.rows(chunk.rows(range));
                    // SAFETY: as above; the host's copy is written after the next forward pass, which waits for `WRITTEN`.
                    unsafe { kernels.start_upload(to, from) }?;
                }
            }
            slot.filled = kernels.record(Queue::Upload)?;
        }
        self.brought += 1;
        Ok(())
    }

    /// Asks for the next chunk's update, and for what it wrote to go back.
    fn update_chunk(
        &mut self,
        kernels: &Kernels,
        sources: &mut Sources,
        tensor_states: &mut TensorStates,
    ) -> Result<(), KernelError> {
        let number = self.updated;
        let chunk = self.chunks.at(number);
        let queue = queue(chunk);
        if self.chunks.begins_run(number, self::queue) {
            sources.weights.ready(kernels, queue, chunk.part)?;
        }
        let slots = self.slots.len().max(1);
        let slot = self.slots.get_mut(number % slots);
        if let Some(slot) = &slot {
            kernels.wait(queue, slot.filled, CAME)?;
        }
        let room = self.room.as_mut().map(Buffer::view_mut);
        let came = slot.map(|slot| slot.came(chunk));
        // SAFETY: all of it lives as long as the optimizer or, like weights and gradients, is kept by whoever keeps that. The
        // computation goes on with the weights after `WRITTEN`, and with the gradients after the last of them.
        let asking = unsafe { Asking::new(kernels, queue) };
        update(
            &asking,
            &chunk.round,
            &mut sources.with(came),
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

    /// Asks for what the update of a chunk wrote to go back.
    fn send_back(&mut self, kernels: &Kernels, weights: &mut Weights) -> Result<(), KernelError> {
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
            // SAFETY: as in `bring`; the slot is written again after `emptied`.
            unsafe { kernels.start_download(store.on_host(turn, away), from.as_in()) }?;
            store.put_back(kernels, turn, away)?;
        }
        slot.emptied = kernels.record(Queue::Download)?;
        Ok(())
    }
}

/// Where a chunk is updated. Tensors that are updated as a whole share one scratch and may take products: they are updated in the
/// queue of the computation, one after the other.
fn queue(chunk: &Chunk) -> Queue {
    match chunk.round[0].whole {
        Some(_) => Queue::Compute,
        None => Queue::Update,
    }
}
