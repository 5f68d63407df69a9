//! Pinned host memory for the offloaded activations of a micro-batch.

use crate::LayerActivation;
use kernels::{Event, KernelError, Kernels, Queue};
use memory::{Buffer, Category, DType, Memory, OutOfMemory, round_up};
use std::collections::HashMap;
use std::ops::Range;

/// Device memory that is being copied to the host. It is given back only by `SavedActivations::give_back_left`, or when both
/// copy queues are done.
pub(crate) struct Leaving {
    pub(crate) _buffer: Buffer,
    pub(crate) event: Event,
}

/// Device memory that is being filled from the host. Nobody reads it before `SavedActivations::bring_back`.
pub(crate) struct Arriving {
    pub(crate) buffer: Buffer,
    pub(crate) event: Event,
}

/// Where on the host each offloaded activation of a micro-batch has its place: one lease, exactly large enough.
pub(crate) struct HostPlaces {
    /// None if nothing is offloaded.
    arena: Option<Buffer>,
    /// The bytes of the arena that each takes.
    places: HashMap<LayerActivation, Range<usize>>,
}

impl HostPlaces {
    /// Leases places for activations of so many bytes.
    pub(crate) fn lease(
        memory: &Memory,
        offloaded: impl Iterator<Item = (LayerActivation, usize)>,
    ) -> Result<HostPlaces, OutOfMemory> {
        let mut end = 0;
        let place = |(at, bytes): (LayerActivation, usize)| {
            let start = end;
            end += round_up(bytes as u64) as usize;
            (at, start..end)
        };
        let places = offloaded.map(place).collect();
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

    /// Whether there is no place at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.arena.is_none()
    }

    /// The arena and the bytes in it that an activation takes.
    fn of(&mut self, at: LayerActivation, x: &Buffer) -> (&mut Buffer, Range<usize>) {
        let place = self.places.get(&at);
        let place = place.expect("what is sent is offloaded by the policy");
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
    pub(crate) unsafe fn send(
        &mut self,
        kernels: &Kernels,
        at: LayerActivation,
        x: &Buffer,
    ) -> Result<Event, KernelError> {
        let (arena, place) = self.of(at, x);
        let out = arena.view_mut().rows(place).cast(x.dtype());
        // SAFETY: the caller's promise for `x`. Places do not overlap, the arena lives as long as the table, and what
        // was copied from this place before is over when this begins (the head of `offload.rs`).
        unsafe { kernels.start_download(out, x.view()) }?;
        kernels.record(Queue::Download)
    }

    /// Asks for the copy of an activation from its place; the event is over when it is back.
    ///
    /// # Safety
    /// `out` stays alive and untouched until the event is over, or the computation was told to wait for it.
    pub(crate) unsafe fn fetch(
        &mut self,
        kernels: &Kernels,
        at: LayerActivation,
        out: &mut Buffer,
    ) -> Result<Event, KernelError> {
        let (arena, place) = self.of(at, out);
        let x = arena.view().rows(place).cast(out.dtype());
        // SAFETY: the caller's promise for `out`; what was copied to this place is there (the head of `offload.rs`).
        unsafe { kernels.start_upload(out.view_mut(), x) }?;
        kernels.record(Queue::Upload)
    }
}
