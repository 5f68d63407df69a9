//! Activations that wait in pinned host memory for their backward pass.
//!
//! Four waits order the copies, and each is needed:
//!
//! | who waits | for what | otherwise |
//! |---|---|---|
//! | the download | the computation so far ([`COMPUTED`]) | it copies what was there before |
//! | the computation, a block later | the download ([`LEFT`]) | what is leased next is written over what is being sent |
//! | the upload | the computation so far ([`FREE`]) | it writes over what is still being read there |
//! | the computation | the upload ([`BACK`]) | it reads what was there before |
//!
//! No more are. An upload needs no wait for the download of what it fetches, since the computation waited for that
//! before the upload waits for the computation. And the next micro-batch may be sent to the same places on the host,
//! since its downloads wait for computation that waited for the uploads of this one.

use crate::model::{Model, ModelError};
use crate::pass::Pass;
use crate::policy::{Action, Policy};
use crate::saved::{Entry, Saved};
use crate::stage::{Activation, Stage};
use kernels::{Event, KernelError, Kernels, Queue};
use memory::{Buffer, Category, DType, Layer, Memory, OutOfMemory, Phase, round_up};
use std::ops::Range;
use std::rc::Rc;

const COMPUTED: &str = "an activation is computed before it leaves";
const LEFT: &str = "an activation has left before its memory is used again";
const FREE: &str = "memory is not in use when an activation returns into it";
const BACK: &str = "an activation is back before it is read";

/// Device memory that is being copied to the host. It is given back only by [`Pass::give_back_left`], or when both
/// copy queues are done.
pub(crate) struct Leaving {
    _buffer: Buffer,
    event: Event,
}

/// Device memory that is being filled from the host. Nobody reads it before [`Pass::bring_back`].
pub(crate) struct Arriving {
    buffer: Buffer,
    event: Event,
}

/// Where on the host each offloaded activation of a micro-batch has its place: one lease, exactly large enough.
pub(crate) struct HostPlaces {
    /// None if nothing is offloaded.
    arena: Option<Buffer>,
    /// Bytes of the arena, by layer and activation; empty for what is not offloaded.
    places: Vec<[Range<usize>; Activation::ALL.len()]>,
}

impl HostPlaces {
    pub(crate) fn lease(
        memory: &Memory,
        model: &Model,
        policy: &Policy,
        (rows, seq): (usize, usize),
    ) -> Result<HostPlaces, OutOfMemory> {
        let mut end = 0;
        let mut place = |layer, activation| {
            let is_offloaded = policy.action(layer, activation) == Action::Offload;
            if !is_offloaded || !model.table().has(activation) {
                return 0..0;
            }
            let (dims, dtype) = model.activation_shape(activation, rows, seq);
            let start = end;
            end += round_up((dims.elements() * dtype.size_in_bytes()) as u64) as usize;
            start..end
        };
        let places = (0..policy.layers())
            .map(|layer| Activation::ALL.map(|activation| place(layer, activation)))
            .collect();
        let lease = |bytes| {
            memory.lease_pinned(
                Category::Activation,
                "offloaded_activations",
                [bytes],
                DType::U8,
            )
        };
        Ok(HostPlaces {
            arena: (end > 0).then(|| lease(end)).transpose()?,
            places,
        })
    }

    /// The arena and the bytes in it that an activation takes.
    fn of(
        &mut self,
        (layer, activation): (usize, Activation),
        x: &Buffer,
    ) -> (&mut Buffer, Range<usize>) {
        let place = self.places[layer][activation as usize].clone();
        let bytes = x.dims().elements() * x.dtype().size_in_bytes();
        assert!(
            bytes <= place.len(),
            "a micro-batch is as large as the settings say"
        );
        let arena = self.arena.as_mut().expect("what has a place has an arena");
        (arena, place.start..place.start + bytes)
    }

    /// Asks for the copy of an activation to its place; the event is over when it is there.
    ///
    /// # Safety
    /// `x` stays alive and as it is until the event is over, or the computation was told to wait for it.
    unsafe fn send(
        &mut self,
        kernels: &dyn Kernels,
        at: (usize, Activation),
        x: &Buffer,
    ) -> Result<Event, KernelError> {
        let (arena, place) = self.of(at, x);
        let out = arena.view_mut().rows(place).cast(x.dtype());
        // SAFETY: the caller's promise for `x`. Places do not overlap, the arena lives as long as the table, and what
        // was copied from this place before is over when this begins (the head of this file).
        unsafe { kernels.start_download(out, x.view()) }?;
        kernels.record(Queue::Download)
    }

    /// Asks for the copy of an activation from its place; the event is over when it is back.
    ///
    /// # Safety
    /// `out` stays alive and untouched until the event is over, or the computation was told to wait for it.
    unsafe fn fetch(
        &mut self,
        kernels: &dyn Kernels,
        at: (usize, Activation),
        out: &mut Buffer,
    ) -> Result<Event, KernelError> {
        let (arena, place) = self.of(at, out);
        let x = arena.view().rows(place).cast(out.dtype());
        // SAFETY: the caller's promise for `out`; what was copied to this place is there (the head of this file).
        unsafe { kernels.start_upload(out.view_mut(), x) }?;
        kernels.record(Queue::Upload)
    }
}

impl Pass<'_> {
    /// Starts an activation on its way to the host, when no later stage of the forward pass reads it.
    pub(crate) fn send(&mut self, layer: usize, activation: Activation) -> Result<(), ModelError> {
        let computed = self.kernels.record(Queue::Compute)?;
        self.kernels.wait(Queue::Download, computed, COMPUTED)?;
        let buffer = self.saved.take_unread(layer, activation);
        let at = (layer, activation);
        // SAFETY: nobody reads or writes what is not in the table as live, and `give_back_left` waits before it ends.
        let sent = unsafe { self.saved.host.send(self.kernels, at, &buffer) };
        // Filed even if the device failed: what was asked for is waited for before the buffer goes.
        *self.saved.entry(layer, activation) = Entry::Leaving(Leaving {
            _buffer: buffer,
            event: *sent.as_ref().unwrap_or(&Event::PAST),
        });
        Ok(sent.map(|_| ())?)
    }

    /// Gives back the device memory of what a block has sent: at the end of the next block's forward pass, so that the
    /// copies have had as long.
    pub(crate) fn give_back_left(&mut self, layer: usize) -> Result<(), ModelError> {
        let entries = self.saved.block(layer);
        let events = entries.iter().filter_map(|entry| match entry {
            Entry::Leaving(leaving) => Some(leaving.event),
            _ => None,
        });
        let Some(last) = events.max_by_key(|event| event.position) else {
            return Ok(());
        };
        self.kernels.wait(Queue::Compute, last, LEFT)?;
        for entry in entries {
            if matches!(entry, Entry::Leaving(_)) {
                *entry = Entry::Away;
            }
        }
        Ok(())
    }

    /// Starts everything that a block has on the host on its way back, what its backward pass reads first first: at
    /// the start of the backward pass of the block after it, so that the copies have as long.
    pub(crate) fn fetch_block(&mut self, layer: usize) -> Result<(), ModelError> {
        let model = self.model;
        for stage in Stage::BLOCK.into_iter().rev() {
            for activation in model.table.backward_reads(stage) {
                if self.saved.is_away(layer, *activation) {
                    self.fetch(layer, *activation)?;
                }
            }
        }
        Ok(())
    }

    fn fetch(&mut self, layer: usize, activation: Activation) -> Result<(), ModelError> {
        let _place = self.memory.enter(Phase::Backward, Layer::Block(layer));
        let (dims, dtype) = self.shape(activation);
        let name = activation.name();
        let mut buffer = self.memory.lease(Category::Activation, name, dims, dtype)?;
        let leased = self.kernels.record(Queue::Compute)?;
        self.kernels.wait(Queue::Upload, leased, FREE)?;
        let at = (layer, activation);
        // SAFETY: nobody reads or writes what is not in the table as live, and `bring_back` waits before it is.
        let fetched = unsafe { self.saved.host.fetch(self.kernels, at, &mut buffer) };
        // As in `send`.
        let event = *fetched.as_ref().unwrap_or(&Event::PAST);
        *self.saved.entry(layer, activation) = Entry::Arriving(Arriving { buffer, event });
        Ok(fetched.map(|_| ())?)
    }

    /// Makes an activation live that is on its way back, or still on the host: a replay may read one of a block that
    /// is further from its backward pass.
    pub(crate) fn bring_back(
        &mut self,
        layer: usize,
        activation: Activation,
    ) -> Result<(), ModelError> {
        if self.saved.is_away(layer, activation) {
            self.fetch(layer, activation)?;
        }
        let entry = self.saved.entry(layer, activation);
        *entry = match std::mem::take(entry) {
            Entry::Arriving(Arriving { buffer, event }) => {
                self.kernels.wait(Queue::Compute, event, BACK)?;
                Entry::Live(Rc::new(buffer))
            }
            other => other,
        };
        Ok(())
    }
}

impl Saved {
    /// Drops everything: a pass ended early. Copies may be under way, so the host waits for their queues; a failure of
    /// that is the device's.
    pub(crate) fn abandon(&mut self, kernels: &dyn Kernels) -> Result<(), KernelError> {
        let finish = |queue| kernels.finish(kernels.record(queue)?);
        let finished = match self.host.arena {
            Some(_) => [Queue::Upload, Queue::Download].map(finish),
            None => [Ok(()), Ok(())],
        };
        self.clear();
        finished.into_iter().collect()
    }
}
