//! States in pinned host memory, which come to the device in chunks to be updated, and go back.
//!
//! A chunk is uploaded into a slot, updated there and downloaded, each in a queue of its own, so that copies each way and
//! updates run beside one another and beside the computation. Five waits order them, and each is needed:
//!
//! | who waits | for what | otherwise |
//! |---|---|---|
//! | the updates | the computation so far, once an update ([`FINAL`]) | they read gradients, and write weights, too early |
//! | the upload | the slot's last download ([`LEFT`]) | it writes over states that are being sent |
//! | the update | the chunk's upload ([`CAME`]) | it reads what was in the slot before |
//! | the download | the chunk's update ([`UPDATED`]) | it sends states as they were |
//! | the computation, once a part | the part's last update ([`WRITTEN`]) | it reads weights as they were |
//!
//! No more are. Slots are used in turn, and queues keep their order, so a chunk's last download is over before it is
//! uploaded again: its slot, or one that was used later, has been emptied by then. And the next gradients are written
//! after the forward pass, in which the computation has waited for every update.

use crate::cover::Cover;
use crate::numbers::Numbers;
use crate::segment::{Segment, segments};
use crate::states::StateBuffers;
use crate::storage::Storage;
use crate::{MasterFormat, MomentFormat};
use kernels::{Event, KernelError, Kernels, Queue};
use memory::{
    Arena, Buffer, Category, DType, Layer, Layout, Memory, OutOfMemory, PARAMETER_PADDING, Space,
};
use std::ops::Range;

const FINAL: &str = "gradients are final before states are updated";
const LEFT: &str = "states have left a slot before others come";
const CAME: &str = "states have come before they are updated";
const UPDATED: &str = "states are updated before they go back";
const WRITTEN: &str = "weights are written before they are read";

/// Which states are offloaded, and in what pieces.
#[derive(Clone, Debug, PartialEq)]
pub struct Offload {
    /// The matrices that each part of the model reads first, in forward order, by their index in the layout. States of
    /// other matrices, and of vectors, which are small, stay on the device.
    pub parts: Vec<(Layer, Vec<usize>)>,
    /// Most bytes of a chunk: of all states of a range of parameters.
    pub chunk_bytes: usize,
    /// Chunks that are on the device at a time.
    pub slots: usize,
}

impl Offload {
    /// The elements whose states are offloaded.
    pub(crate) fn cover(&self, layout: &Layout) -> Cover {
        let entries = layout.entries();
        let matrices = self.parts.iter().flat_map(|(_, matrices)| matrices);
        Cover::new(matrices.map(|index| entries[*index].padded_range()))
    }
}

/// Offloaded states, and where their updates are.
pub(crate) struct Offloaded {
    cover: Cover,
    states: StateBuffers,
    slots: Vec<Slot>,
    /// The pieces that are moved and updated at a time, in the order of updates.
    chunks: Vec<Segment>,
    /// Every part, with the number of chunks up to its end.
    part_ends: Vec<(Layer, usize)>,
    /// Since the beginning, chunks that were asked to come, chunks whose update was asked for, and those of them that the
    /// computation was told to wait for.
    uploaded: usize,
    updated: usize,
    awaited: usize,
    /// When the last chunk whose update was asked for is updated.
    last_updated: Event,
    /// Chunks that may come: those of the update that is under way or next.
    due: usize,
}

/// Device memory for a chunk.
struct Slot {
    bytes: Buffer,
    filled: Event,
    emptied: Event,
}

impl Offloaded {
    /// Leases states on the host, and slots on the device.
    pub(crate) fn lease(
        memory: &Memory,
        layout: &Layout,
        offload: &Offload,
        formats: (MomentFormat, MasterFormat),
        weights: DType,
    ) -> Result<Offloaded, OutOfMemory> {
        let space = Space::Host;
        let cover = offload.cover(layout);
        let mut states =
            StateBuffers::lease(Storage { memory, space }, layout, &cover, formats, weights)?;
        let (mut chunks, mut part_ends) = (Vec::new(), Vec::new());
        for (part, matrices) in &offload.parts {
            let entries = matrices.iter().map(|index| &layout.entries()[*index]);
            let of_part = Cover::new(entries.map(|entry| entry.padded_range()));
            for segment in segments(layout, formats.0, &of_part) {
                let block = segment.range.start..segment.range.start + PARAMETER_PADDING;
                let block_bytes = states.views(&block).bytes();
                let most = (offload.chunk_bytes / block_bytes).max(1) * PARAMETER_PADDING;
                chunks.extend(cut(segment, most));
            }
            part_ends.push((*part, chunks.len()));
        }
        let bytes_of = |chunk: &Segment| states.views(&chunk.range).carved_bytes();
        let slot_bytes = chunks.iter().map(bytes_of).max().unwrap_or(0);
        let slot = |_| {
            let category = Category::OptimizerState;
            Ok(Slot {
                bytes: memory.lease_persistent(
                    category,
                    "offload_slot",
                    [slot_bytes],
                    DType::U8,
                )?,
                filled: Event::PAST,
                emptied: Event::PAST,
            })
        };
        let slots = (0..offload.slots.clamp(1, chunks.len().max(1))).map(slot);
        Ok(Offloaded {
            slots: slots.collect::<Result<_, OutOfMemory>>()?,
            cover,
            states,
            chunks,
            part_ends,
            uploaded: 0,
            updated: 0,
            awaited: 0,
            last_updated: Event::PAST,
            due: 0,
        })
    }

    /// Whether a range's states are here.
    pub(crate) fn holds(&self, range: &Range<usize>) -> bool {
        self.cover.rows(range).is_some()
    }

    pub(crate) fn states(&self) -> &StateBuffers {
        &self.states
    }

    /// The states, to be written by the host, when all of them are back.
    pub(crate) fn states_at_rest(
        &mut self,
        kernels: &dyn Kernels,
    ) -> Result<&mut StateBuffers, KernelError> {
        assert_eq!(self.uploaded, self.updated, "an update is under way");
        for slot in &self.slots {
            kernels.finish(slot.emptied)?;
        }
        Ok(&mut self.states)
    }

    /// Bytes of the slots on the device.
    pub(crate) fn slot_bytes(&self) -> u64 {
        self.slots.iter().map(|slot| slot.bytes.bytes()).sum()
    }

    /// Asks for the first chunks of the next update.
    pub(crate) fn prefetch(&mut self, kernels: &dyn Kernels) -> Result<(), KernelError> {
        let updates = self.updated / self.chunks.len().max(1);
        self.due = (updates + 1) * self.chunks.len();
        self.fill_slots(kernels)
    }

    /// Begins an update with gradients and numbers that the computation has been asked for.
    pub(crate) fn begin(&mut self, kernels: &dyn Kernels) -> Result<(), KernelError> {
        let asked = kernels.record(Queue::Compute)?;
        kernels.wait(Queue::Update, asked, FINAL)?;
        self.prefetch(kernels)
    }

    /// Updates the chunks up to the end of a part, those that have not been, before the computation goes on; all for
    /// [`Layer::Whole`].
    pub(crate) fn update_part(
        &mut self,
        kernels: &dyn Kernels,
        numbers: &Numbers,
        parameters: &mut Arena,
        gradients: &Arena,
        part: Layer,
    ) -> Result<(), KernelError> {
        let end = self.part_ends.iter().find(|(own, _)| *own == part);
        let end = end.map_or(self.chunks.len(), |(_, end)| *end);
        let end = self.due - self.chunks.len() + end;
        while self.updated < end {
            self.update_chunk(kernels, numbers, parameters, gradients)?;
            self.fill_slots(kernels)?;
        }
        if self.awaited < end {
            kernels.wait(Queue::Compute, self.last_updated, WRITTEN)?;
            self.awaited = end;
        }
        Ok(())
    }

    /// Whether the computation sees every chunk updated.
    pub(crate) fn is_updated(&self) -> bool {
        self.awaited == self.due
    }

    /// Uploads as far as there are slots.
    fn fill_slots(&mut self, kernels: &dyn Kernels) -> Result<(), KernelError> {
        while self.uploaded < self.due.min(self.updated + self.slots.len()) {
            let range = self.chunks[self.uploaded % self.chunks.len()].range.clone();
            let index = self.uploaded % self.slots.len();
            let slot = &mut self.slots[index];
            kernels.wait(Queue::Upload, slot.emptied, LEFT)?;
            let on_host = self.states.views(&range);
            let on_device = on_host.carve(slot.bytes.view_mut());
            for (to, from) in on_device.tensors().into_iter().zip(on_host.tensors()) {
                // SAFETY: both live as long as the optimizer, and kernels are dropped, with all their work, before it
                // (`AdamW::lease`); the slot is read after `filled`, and the host's copy written by a later download.
                unsafe { kernels.start_upload(to, from.as_in()) }?;
            }
            slot.filled = kernels.record(Queue::Upload)?;
            self.uploaded += 1;
        }
        Ok(())
    }

    fn update_chunk(
        &mut self,
        kernels: &dyn Kernels,
        numbers: &Numbers,
        parameters: &mut Arena,
        gradients: &Arena,
    ) -> Result<(), KernelError> {
        let segment = self.chunks[self.updated % self.chunks.len()].clone();
        let index = self.updated % self.slots.len();
        let slot = &mut self.slots[index];
        let on_host = self.states.views(&segment.range);
        kernels.wait(Queue::Update, slot.filled, CAME)?;
        let on_device = on_host.carve(slot.bytes.view_mut());
        let update = numbers.update(parameters, gradients, &segment, on_device);
        // SAFETY: all of it lives as long as the optimizer or, like the arenas, is kept by whoever keeps that. The
        // computation goes on with the weights after `WRITTEN`, and with the gradients after the last of them.
        unsafe { kernels.start_adamw(update) }?;
        self.last_updated = kernels.record(Queue::Update)?;
        kernels.wait(Queue::Download, self.last_updated, UPDATED)?;
        let on_device = on_host.carve(slot.bytes.view_mut());
        for (from, to) in on_device.tensors().into_iter().zip(on_host.tensors()) {
            // SAFETY: as in `fill_slots`; the slot is written again after `emptied`.
            unsafe { kernels.start_download(to, from.as_in()) }?;
        }
        slot.emptied = kernels.record(Queue::Download)?;
        self.updated += 1;
        Ok(())
    }
}

/// Pieces of a segment, of about equal size and of at most `most` elements.
fn cut(segment: Segment, most: usize) -> impl Iterator<Item = Segment> {
    let Segment { range, decays } = segment;
    let pieces = range.len().div_ceil(most);
    let size = range
        .len()
        .div_ceil(pieces)
        .next_multiple_of(PARAMETER_PADDING);
    range.clone().step_by(size).map(move |start| Segment {
        range: start..(start + size).min(range.end),
        decays,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_of_about_equal_size() {
        let segment = |range| Segment {
            range,
            decays: true,
        };
        let pieces = |range, most| -> Vec<Range<usize>> {
            cut(segment(range), most).map(|piece| piece.range).collect()
        };
        assert_eq!(pieces(256..1280, 512), [256..768, 768..1280]);
        assert_eq!(pieces(0..1280, 1024), [0..768, 768..1280]);
        assert_eq!(pieces(0..768, 256), [0..256, 256..512, 512..768]);
    }
}
