//! Offloaded activations, which wait in pinned host memory for their backward pass.
//!
//! Four waits order the copies, and each is needed:
//!
//! | who waits | for what | without the wait |
//! |---|---|---|
//! | the download | the computation so far ([`COMPUTED`]) | it copies values from before the computation |
//! | the computation, a block later | the download ([`LEFT`]) | the next lease there overwrites what is being sent |
//! | the upload | the computation so far ([`FREE`]) | it overwrites what an operation still reads there |
//! | the computation | the upload ([`BACK`]) | it reads values from before the upload |
//!
//! No other waits are needed. An upload need not wait for the download of the same activation: the upload waits for
//! computation that has waited for that download. The next micro-batch may reuse the same places on the host: its
//! downloads wait for computation that has waited for this one's uploads.

use crate::host_places::{Arriving, Leaving};
use crate::saved::{SavedActivations, SlotState};
use crate::{BatchShape, LayerActivation, Result};
use kernels::{Event, KernelError, Kernels, Queue};
use memory::{Category, Layer, Memory, Phase};
use std::rc::Rc;

const COMPUTED: &str = "an activation is computed before it leaves";
const LEFT: &str = "an activation has left before its memory is used again";
const FREE: &str = "memory is not in use when an activation returns into it";
const BACK: &str = "an activation is back before it is read";

impl SavedActivations {
    /// Starts sending an activation to the host. No later stage of the forward pass may read it.
    pub(crate) fn send(&mut self, kernels: &Kernels, at: LayerActivation) -> Result {
        let computed = kernels.record(Queue::Compute)?;
        kernels.wait(Queue::Download, computed, COMPUTED)?;
        let buffer = self.take_unread(at);
        // SAFETY: nobody reads or writes an activation that is not live, and `give_back_left` waits before the buffer
        // is dropped.
        let sent = unsafe { self.host().send(kernels, at, &buffer) };
        // Filed even if the device failed, so that the buffer outlives a copy that was started.
        self.slot_mut(at).state = SlotState::Leaving(Leaving {
            _buffer: buffer,
            event: *sent.as_ref().unwrap_or(&Event::PAST),
        });
        Ok(sent.map(|_| ())?)
    }

    /// Gives back the device memory of the activations that a block has sent. It is called at the end of the next
    /// block's forward pass, so that the copies have that long.
    ///
    /// # Errors
    /// [`ModelError::Kernel`](crate::ModelError::Kernel) if the device fails.
    pub fn give_back_left(&mut self, kernels: &Kernels, layer: usize) -> Result {
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

    /// Starts fetching an activation from the host.
    pub(crate) fn fetch(
        &mut self,
        memory: &Memory,
        kernels: &Kernels,
        at: LayerActivation,
        batch: BatchShape,
    ) -> Result {
        let _place = memory.enter(Phase::Backward, Layer::Block(at.layer));
        let compute = self.dtype;
        let (dims, dtype) = self.slot(at).extent.resolve(batch, compute);
        let name = at.activation.name();
        let mut buffer = memory.lease(Category::Activation, name, dims, dtype)?;
        let leased = kernels.record(Queue::Compute)?;
        kernels.wait(Queue::Upload, leased, FREE)?;
        // SAFETY: nobody reads or writes an activation that is not live, and `bring_back` waits before it becomes live.
        let fetched = unsafe { self.host().fetch(kernels, at, &mut buffer) };
        // Filed even if the device failed, as in `send`.
        let event = *fetched.as_ref().unwrap_or(&Event::PAST);
        self.slot_mut(at).state = SlotState::Arriving(Arriving { buffer, event });
        Ok(fetched.map(|_| ())?)
    }

    /// Makes an activation live that is on its way back or still on the host. It may still be on the host if a replay
    /// reads an activation of an earlier block, whose fetching has not begun.
    pub(crate) fn bring_back(
        &mut self,
        memory: &Memory,
        kernels: &Kernels,
        at: LayerActivation,
        batch: BatchShape,
    ) -> Result {
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

    /// Drops everything after a pass that ended early. The host waits for the queues, since copies may be under way.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn abandon(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        let finish = |queue| kernels.finish(kernels.record(queue)?);
        let finished = match self.is_offloading() {
            true => [Queue::Upload, Queue::Download].map(finish),
            false => [Ok(()), Ok(())],
        };
        self.clear();
        finished.into_iter().collect()
    }
}
