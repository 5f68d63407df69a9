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

use crate::host_places::{Arriving, Leaving};
use crate::saved::{SavedActivations, SlotState};
use crate::{BatchShape, LayerActivation, ModelError};
use kernels::{Event, KernelError, Kernels, Queue};
use memory::{Category, Layer, Memory, Phase};
use std::rc::Rc;

const COMPUTED: &str = "an activation is computed before it leaves";
const LEFT: &str = "an activation has left before its memory is used again";
const FREE: &str = "memory is not in use when an activation returns into it";
const BACK: &str = "an activation is back before it is read";

impl SavedActivations {
    /// Starts an activation on its way to the host, when no later stage of the forward pass reads it.
    pub(crate) fn send(
        &mut self,
        kernels: &Kernels,
        at: LayerActivation,
    ) -> Result<(), ModelError> {
        let computed = kernels.record(Queue::Compute)?;
        kernels.wait(Queue::Download, computed, COMPUTED)?;
        let buffer = self.take_unread(at);
        // SAFETY: nobody reads or writes what is not in the table as live, and `give_back_left` waits before it ends.
        let sent = unsafe { self.host.send(kernels, at, &buffer) };
        // Filed even if the device failed: what was asked for is waited for before the buffer goes.
        self.slot_mut(at).state = SlotState::Leaving(Leaving {
            _buffer: buffer,
            event: *sent.as_ref().unwrap_or(&Event::PAST),
        });
        Ok(sent.map(|_| ())?)
    }

    /// Gives back the device memory of what a block has sent: at the end of the next block's forward pass, so that the
    /// copies have had as long.
    pub(crate) fn give_back_left(
        &mut self,
        kernels: &Kernels,
        layer: usize,
    ) -> Result<(), ModelError> {
        let slots = self.block(layer);
        let events = slots.iter().filter_map(|slot| match &slot.state {
            SlotState::Leaving(leaving) => Some(leaving.event),
            _ => None,
        });
        let Some(last) = events.max_by_key(|event| event.position) else {
            return Ok(());
        };
        kernels.wait(Queue::Compute, last, LEFT)?;
        for slot in slots {
            if matches!(slot.state, SlotState::Leaving(_)) {
                slot.state = SlotState::Away;
            }
        }
        Ok(())
    }

    /// Starts an activation on its way back.
    pub(crate) fn fetch(
        &mut self,
        memory: &Memory,
        kernels: &Kernels,
        at: LayerActivation,
        batch: BatchShape,
    ) -> Result<(), ModelError> {
        let _place = memory.enter(Phase::Backward, Layer::Block(at.layer));
        let compute = self.dtype;
        let (dims, dtype) = self.slot(at).extent.resolve(batch, compute);
        let name = at.activation.name();
        let mut buffer = memory.lease(Category::Activation, name, dims, dtype)?;
        let leased = kernels.record(Queue::Compute)?;
        kernels.wait(Queue::Upload, leased, FREE)?;
        // SAFETY: nobody reads or writes what is not in the table as live, and `bring_back` waits before it is.
        let fetched = unsafe { self.host.fetch(kernels, at, &mut buffer) };
        // As in `send`.
        let event = *fetched.as_ref().unwrap_or(&Event::PAST);
        self.slot_mut(at).state = SlotState::Arriving(Arriving { buffer, event });
        Ok(fetched.map(|_| ())?)
    }

    /// Makes an activation live that is on its way back, or still on the host: a replay may read one of a block that
    /// is further from its backward pass.
    pub(crate) fn bring_back(
        &mut self,
        memory: &Memory,
        kernels: &Kernels,
        at: LayerActivation,
        batch: BatchShape,
    ) -> Result<(), ModelError> {
        if self.is_away(at) {
            self.fetch(memory, kernels, at, batch)?;
        }
        let state = &mut self.slot_mut(at).state;
        *state = match std::mem::take(state) {
            SlotState::Arriving(Arriving { buffer, event }) => {
                kernels.wait(Queue::Compute, event, BACK)?;
                SlotState::Live(Rc::new(buffer))
            }
            other => other,
        };
        Ok(())
    }

    /// Drops everything: a pass ended early. Copies may be under way, so the host waits for their queues; a failure of
    /// that is the device's.
    pub(crate) fn abandon(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        let finish = |queue| kernels.finish(kernels.record(queue)?);
        let finished = match self.host.is_empty() {
            false => [Queue::Upload, Queue::Download].map(finish),
            true => [Ok(()), Ok(())],
        };
        self.clear();
        finished.into_iter().collect()
    }
}
