//! Pinned host memory for the offloaded activations of a micro-batch.

use crate::LayerActivation;
use kernels::{Event, KernelError, Kernels, Queue};
use memory::{Buffer, Category, DType, Memory, OutOfMemory, round_up};
use std::collections::HashMap;
use std::ops::Range;

/// Device memory that is being copied to the host. It is kept until `SavedActivations::give_back_left`, or until both
/// copy queues are done.
pub(crate) struct Leaving {
    pub(crate) _buffer: Buffer,
    pub(crate) event: Event,
}

/// Device memory that is being filled from the host. It is not read before `SavedActivations::bring_back`.
pub(crate) struct Arriving {
    pub(crate) buffer: Buffer,
    pub(crate) event: Event,
}

/// The place of each offloaded activation of a micro-batch in host memory: one lease, exactly large enough.
pub(crate) struct HostPlaces {
    /// None if nothing is offloaded.
    arena: Option<Buffer>,
    /// The bytes of the arena that each activation has.
    places: HashMap<LayerActivation, Range<usize>>,
}

impl HostPlaces {
    /// Leases places for activations of these sizes in bytes.
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

    /// Whether there are no places, because nothing is offloaded.
    pub(crate) fn is_empty(&self) -> bool {
        self.arena.is_none()
    }

    /// The arena, and the bytes in it that belong to an activation.
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

    /// Queues the copy of an activation to its place, and returns the event of its end.
    ///
    /// # Safety
    /// `x` stays alive and unchanged until the event is over, or until the computation waits for it.
    pub(crate) unsafe fn send(
        &mut self,
        kernels: &Kernels,
        at: LayerActivation,
        x: &Buffer,
    ) -> Result<Event, KernelError> {
        let (arena, place) = self.of(at, x);
        let out = arena.view_mut().rows(place).cast(x.dtype());
        // SAFETY: the caller's promise for `x`. Places do not overlap, and the arena lives as long as the table. The
        // earlier copy from this place ends before this one begins (see the head of `offload.rs`).
        unsafe { kernels.start_download(out, x.view()) }?;
        kernels.record(Queue::Download)
    }

    /// Queues the copy of an activation from its place, and returns the event of its end.
    ///
    /// # Safety
    /// `out` stays alive and untouched until the event is over, or until the computation waits for it.
    pub(crate) unsafe fn fetch(
        &mut self,
        kernels: &Kernels,
        at: LayerActivation,
        out: &mut Buffer,
    ) -> Result<Event, KernelError> {
        let (arena, place) = self.of(at, out);
        let x = arena.view().rows(place).cast(out.dtype());
        // SAFETY: the caller's promise for `out`. The copy to this place has ended (see the head of `offload.rs`).
        unsafe { kernels.start_upload(out.view_mut(), x) }?;
        kernels.record(Queue::Upload)
    }
}
