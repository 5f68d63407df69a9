//! The operations on shapes: everything is checked, nothing is computed.

pub mod clocks;
pub mod timeline;

use crate::workspace::lease_workspace;
use crate::{
    Backend, Event, ExchangeBytes, Kernels, Queue, Queues, Reading, Request, Result, Target,
};
use memory::{Buffer, ByPhase, DType, In, Memory, Out, OutOfMemory};
use std::cell::Cell;
use std::rc::Rc;
use timeline::Timeline;

/// Kernels for planning. They accept and refuse the same operations as the target's, hold the same workspace, and count
/// the floating-point operations of matrix products.
pub struct Meta {
    target: Target,
    memory: Memory,
    flops: FlopCounter,
    workspace: Option<Buffer>,
    rank: usize,
    timeline: Option<Timeline>,
}

/// Floating-point operations of matrix products (two per multiplication), by the phase in which they were called.
/// Attention counts without regard to causality. Clones share one count. A step on millions of tokens has more than 2^64.
#[derive(Clone, Default)]
pub struct FlopCounter {
    by_phase: Rc<Cell<ByPhase<u128>>>,
}

impl FlopCounter {
    /// The operations counted so far.
    pub fn by_phase(&self) -> ByPhase<u128> {
        self.by_phase.get()
    }
}

impl Meta {
    /// Leases the target's workspace for matrix products whose narrowest type is `dtype`.
    ///
    /// # Errors
    /// [`OutOfMemory`] if a limit refuses the workspace.
    pub fn new(
        memory: &Memory,
        target: Target,
        dtype: DType,
        flops: FlopCounter,
    ) -> Result<Kernels<Meta>, OutOfMemory> {
        Ok(Kernels::new(Meta {
            target,
            memory: memory.clone(),
            flops,
            workspace: lease_workspace(memory, target, dtype)?,
            rank: 0,
            timeline: None,
        }))
    }
}

impl Kernels<Meta> {
    /// Acts as a rank of a group, whose other ranks do not exist.
    pub fn of_rank(self, rank: usize) -> Kernels<Meta> {
        Kernels::new(Meta {
            rank,
            ..self.backend
        })
    }

    /// Also keeps time on a timeline.
    pub fn on(self, timeline: &Timeline) -> Kernels<Meta> {
        Kernels::new(Meta {
            timeline: Some(timeline.clone()),
            ..self.backend
        })
    }
}

impl Meta {
    fn count(&self, multiplications: usize) {
        let flops = 2 * multiplications as u128;
        let mut by_phase = self.flops.by_phase.get();
        *by_phase.get_mut(self.memory.place().phase) += flops;
        self.flops.by_phase.set(by_phase);
    }
}

impl Backend for Meta {
    fn target(&self) -> Target {
        self.target
    }

    fn runs_ahead(&self) -> bool {
        self.target == Target::Cuda
    }

    fn widens(&self) -> bool {
        self.target != Target::Cpu || self.workspace.is_some()
    }

    unsafe fn ask(&self, queue: Queue, request: Request) -> Result {
        if let Request::Operation(operation) = &request {
            self.count(operation.multiplications());
        }
        if let Some(timeline) = &self.timeline {
            let place = self.memory.place();
            match request {
                Request::Operation(operation) => timeline.execute(queue, &operation, place),
                Request::Copy(_, x) => timeline.copy(queue, x.bytes(), place),
                Request::Disk(copy) => timeline.copy(queue, copy.bytes(), place),
                Request::Exchange(exchange) => {
                    if timeline.is_beside_others() {
                        let sends = exchange.sends.iter().map(|(to, _)| *to);
                        let receives = exchange.receives.iter().map(|(from, _)| *from);
                        timeline.meet(&sends.collect::<Vec<_>>(), &receives.collect::<Vec<_>>());
                    }
                    self.counts_exchange(exchange.bytes(self.rank));
                }
            }
        }
        Ok(())
    }

    unsafe fn write(&self, _out: Out, _bytes: &[u8]) -> Result {
        Ok(())
    }

    unsafe fn read(&self, _bytes: &mut [u8], _x: In) -> Result {
        Ok(())
    }

    unsafe fn start_reading(&self, x: In) -> Result<Reading> {
        Ok(Reading::done(vec![0; x.bytes()]))
    }

    fn keeps_time_with_others(&self) -> bool {
        let timeline = self.timeline.as_ref();
        timeline.is_some_and(Timeline::is_beside_others)
    }

    fn counts_exchange(&self, bytes: ExchangeBytes) -> bool {
        if let Some(timeline) = &self.timeline {
            timeline.exchange(bytes, self.memory.place());
        }
        true
    }
}

impl Queues for Meta {
    fn rank(&self) -> usize {
        self.rank
    }

    fn record(&self, queue: Queue) -> Result<Event> {
        let timeline = self.timeline.as_ref();
        Ok(timeline.map_or(Event::PAST, |timeline| timeline.record(queue)))
    }

    fn wait(&self, queue: Queue, event: Event, _reason: &'static str) -> Result {
        if let Some(timeline) = &self.timeline {
            timeline.wait(queue, event);
        }
        Ok(())
    }
}
