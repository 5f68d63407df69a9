//! What a stage of a pipeline sends to its neighbours and receives from them: the residual stream between two blocks, and its gradient.
//!
//! | who waits | for what | without the wait |
//! |---|---|---|
//! | the exchange | the computation so far ([`READY`]) | it sends what is not computed, or writes into memory that is still read |
//! | the computation | the exchange that brings its input ([`CAME`]) | it reads what has not come |
//! | the computation, a pass later | the exchange ([`SENT`]) | the next lease there overwrites what is being sent |

use crate::Result;
use crate::forward::Forward;
use kernels::{Event, Exchange, KernelError, Kernels, Queue};
use memory::{Buffer, Category, Layer, Phase};
use model::BatchShape;
use settings::{Carried, Handover};
use std::collections::HashMap;

const READY: &str = "what a stage sends is computed, and the place of what it receives is free, before they are exchanged";
const CAME: &str = "what another stage computed has come before it is read";
const SENT: &str = "what a stage sends has left before its memory is used again";

/// What waits to be sent, has been received, or is on its way.
#[derive(Default)]
pub(crate) struct Neighbours {
    made: HashMap<Carried, Buffer>,
    came: HashMap<Carried, (Buffer, Event)>,
    sent: Vec<(Buffer, Event)>,
}

impl Neighbours {
    /// Keeps what a pass made until it is sent.
    pub(crate) fn keep(&mut self, of: Carried, made: Buffer) {
        self.made.insert(of, made);
    }

    /// What has come for a pass, which may read it from now on.
    pub(crate) fn take(
        &mut self,
        kernels: &Kernels,
        of: Carried,
    ) -> Result<Option<Buffer>, KernelError> {
        let Some((buffer, came)) = self.came.remove(&of) else {
            return Ok(None);
        };
        kernels.wait(Queue::Compute, came, CAME)?;
        Ok(Some(buffer))
    }

    /// Gives back the memory of what was sent. Called after a pass, so that the exchange had that long.
    pub(crate) fn give_back(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        if let Some((_, last)) = self.sent.last() {
            kernels.wait(Queue::Compute, *last, SENT)?;
        }
        self.sent.clear();
        Ok(())
    }

    /// Starts an exchange with the neighbours, if there is a pipeline. `trains`: whether a backward pass follows. `shape` is that of each
    /// micro-batch, by its number.
    pub(crate) fn exchange(
        &mut self,
        (at, trains): (&Forward, bool),
        transfers: &[Handover],
        shape: impl Fn(usize) -> BatchShape,
    ) -> Result {
        let Some((pipeline, ranks)) = at.pipeline else {
            return Ok(());
        };
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for transfer in transfers {
            let of = transfer.of;
            let peer = ranks.in_stage(transfer.peer(pipeline.stages));
            let layer = pipeline.layers[of.input_of].start;
            if of.is_gradient && !at.model.architecture().needs_input_gradient(layer) {
                continue;
            }
            if transfer.is_sent {
                let made = self.made.remove(&of);
                sends.push((peer, made.expect("a pass made what is sent")));
            } else {
                let place = lease((at, trains), of.is_gradient, layer, shape(of.micro_batch))?;
                receives.push((peer, of, place));
            }
        }
        if sends.is_empty() && receives.is_empty() {
            return Ok(());
        }
        let kernels = at.kernels;
        kernels.wait(Queue::Collective, kernels.record(Queue::Compute)?, READY)?;
        // SAFETY: all buffers are kept until the computation has waited for the event below, and nobody reads or writes them
        // before; if anything fails, they are kept for good.
        let started = unsafe {
            let views = sends.iter().map(|(peer, buffer)| (*peer, buffer.view()));
            let places = receives.iter_mut();
            let list = Exchange {
                sends: views.collect(),
                receives: places
                    .map(|(peer, _, buffer)| (*peer, buffer.view_mut()))
                    .collect(),
            };
            let bytes = list.bytes(ranks.of_all().number);
            kernels.start_exchange_of_all(bytes, Box::new(move || list))
        };
        let event = started.and_then(|()| kernels.record(Queue::Collective));
        let after = *event.as_ref().unwrap_or(&Event::PAST);
        self.sent
            .extend(sends.into_iter().map(|(_, buffer)| (buffer, after)));
        let came = receives.into_iter();
        self.came
            .extend(came.map(|(_, of, buffer)| (of, (buffer, after))));
        Ok(event.map(|_| ())?)
    }
}

impl Drop for Neighbours {
    /// After a failure, other stages may still read or write what is under way: that memory stays leased until the process ends.
    fn drop(&mut self) {
        let sent = self.sent.drain(..).map(|(buffer, _)| buffer);
        let came = self.came.drain().map(|(_, (buffer, _))| buffer);
        sent.chain(came).for_each(std::mem::forget);
    }
}

/// Room for what comes: a block's input, or the gradient of the next stage's.
fn lease(
    (at, trains): (&Forward, bool),
    is_gradient: bool,
    layer: usize,
    shape: BatchShape,
) -> Result<Buffer> {
    if is_gradient {
        let _place = at.memory.enter(Phase::Backward, Layer::Block(layer - 1));
        let (dims, dtype) = at.model.input_of_block(shape);
        return Ok(at.memory.lease(Category::Temporary, "dx", dims, dtype)?);
    }
    let phase = match trains {
        true => Phase::Forward,
        false => Phase::Eval,
    };
    let _place = at.memory.enter(phase, Layer::Block(layer));
    Ok(at.saved.lease_input(at.memory, layer, shape, trains)?)
}
