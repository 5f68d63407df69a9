//! Sections of a step as CUDA graphs: captured once, then launched as a whole.
//!
//! Within a section the device gets no calls: they are kept back, in order. At the end of a new section they are made
//! into streams that capture, and the resulting graph is launched. When the section comes again, each call is compared
//! with the one in its place. If all are the same (kernels, sizes, addresses, every argument), the graph is launched at
//! the end. So a graph never runs with other addresses than it was captured with, and the host makes the same leases,
//! counts and checks as without graphs. At the first difference, the calls kept back are made, and all later ones at
//! once; the same happens if a driver refuses to capture. In any case each call is made exactly once.
//!
//! All streams are joined before a graph, forked from the computation's within it, and joined again at its end. So
//! events from before the section are over when it begins, and the section's own when it ends. A wait for an older
//! event needs no place in the graph, where CUDA would refuse it.
//!
//! The capture is for this thread only (`CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`). Threads of a disk go on with their
//! events. A call of this thread that must not be captured is refused, rather than made before the captured ones.

use super::calls::{Call, Calls, Records};
use super::handles::{Capture, Event, Graph};
use super::{CudaDriver, error};
use crate::cuda::{Gemm, Launch, Workspace};
use crate::{KernelError, Queue, Result, Section};
use cudarc::driver::result::DriverError;
use std::cell::RefCell;
use std::collections::HashMap;

/// Most graphs. Padded micro-batches have at most this many shapes. A graph takes some KiB of the driver's memory per
/// call.
const GRAPHS_MAX: usize = 16;

/// Most captures of one section: a section that differs every time is not worth more.
const CAPTURES_MAX: usize = 4;

/// A driver's state of sections.
#[derive(Default)]
pub(super) struct Sections {
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    open: Option<Open>,
    known: HashMap<Section, KnownGraph>,
    captures: HashMap<Section, usize>,
    /// The reason why no more graphs are made, if so.
    refusal: Option<String>,
}

/// A graph, and the calls that it was captured from.
struct KnownGraph {
    calls: Calls,
    graph: Graph,
}

/// The section that has begun and not ended.
struct Open {
    section: Section,
    records: Records,
    kept: KeptCalls,
}

/// The calls kept back.
enum KeptCalls {
    /// All calls so far of a new section.
    New(Calls),
    /// The calls before this place of a known section.
    KnownGraph(KnownGraph, usize),
    /// None: calls are made at once.
    Nothing,
}

/// How records and waits are made.
enum Order {
    /// At once, into the streams and their histories.
    Direct(Records),
    /// As edges of a graph. The events of each queue live only during the capture, and are in no history.
    Captured([Vec<Event>; Queue::ALL.len()]),
}

impl Sections {
    /// The reason why no more graphs are made, if so.
    pub(super) fn refusal(&self) -> Option<String> {
        self.state.borrow().refusal.clone()
    }
}

impl CudaDriver {
    /// Begins a section. It is ignored if it cannot have a graph.
    pub(super) fn open_section(&self, section: Section) {
        let mut state = self.sections.state.borrow_mut();
        assert!(state.open.is_none(), "sections lie one after the other");
        let kept = match state.known.remove(&section) {
            Some(known) => KeptCalls::KnownGraph(known, 0),
            None => {
                let captures = state.captures.get(&section).copied().unwrap_or(0);
                let has_room = state.known.len() < GRAPHS_MAX && captures < CAPTURES_MAX;
                if state.refusal.is_some() || !has_room {
                    return;
                }
                KeptCalls::New(Calls::default())
            }
        };
        state.open = Some(Open {
            section,
            records: Records::after(self.device.streams.recorded()),
            kept,
        });
        self.device.keeps_back.set(true);
    }

    /// Whether a call that is neither a launch nor a product is kept back until the end of the section.
    pub(super) fn keeps(&self, call: Call) -> Result<bool> {
        self.keeps_call(
            |calls| calls.push(call.clone()),
            |calls, at| calls.is(at, &call),
        )
    }

    /// Whether a launch is kept back.
    pub(super) fn keeps_launch(&self, launch: &Launch) -> Result<bool> {
        self.keeps_call(
            |calls| calls.push_launch(launch),
            |calls, at| calls.is_launch(at, launch),
        )
    }

    /// Whether products are kept back.
    pub(super) fn keeps_gemm(&self, gemm: &Gemm, workspace: Workspace) -> Result<bool> {
        self.keeps_call(
            |calls| calls.push_gemm(gemm, workspace),
            |calls, at| calls.is_gemm(at, gemm, workspace),
        )
    }

    /// Keeps a call back if the section is new, or if the call is the next one of a known section. A different call
    /// ends keeping back.
    fn keeps_call(
        &self,
        push: impl FnOnce(&mut Calls),
        is_next: impl Fn(&Calls, usize) -> bool,
    ) -> Result<bool> {
        let mut state = self.sections.state.borrow_mut();
        let Some(open) = &mut state.open else {
            return Ok(false);
        };
        match &mut open.kept {
            KeptCalls::Nothing => return Ok(false),
            KeptCalls::New(calls) => {
                push(calls);
                return Ok(true);
            }
            KeptCalls::KnownGraph(known, at) if is_next(&known.calls, *at) => {
                *at += 1;
                return Ok(true);
            }
            KeptCalls::KnownGraph(..) => {}
        }
        drop(state);
        self.let_go().map(|()| false)
    }

    /// The event of a record that is kept back; none if the record is to be made at once.
    pub(super) fn keeps_record(&self, queue: Queue) -> Result<Option<crate::Event>> {
        if !self.keeps(Call::Record(queue))? {
            return Ok(None);
        }
        let mut state = self.sections.state.borrow_mut();
        let open = state.open.as_mut().expect("what keeps calls back is open");
        Ok(Some(open.records.add(queue)))
    }

    /// Whether a stream's wait for another stream's event is kept back. A wait for an event from before the section is
    /// not needed, because all streams are joined before it.
    pub(super) fn keeps_wait(&self, queue: Queue, event: crate::Event) -> Result<bool> {
        if !self.device.keeps_back.get() {
            return Ok(false);
        }
        let number = {
            let state = self.sections.state.borrow();
            let open = state.open.as_ref().expect("what keeps calls back is open");
            open.records.number(event)
        };
        match number {
            None => Ok(true),
            Some(record) => self.keeps(Call::Wait {
                queue,
                of: event.queue,
                record,
            }),
        }
    }

    /// Makes the calls kept back. Later calls of the section are made at once. Called before anything that cannot be
    /// kept back.
    pub(super) fn let_go(&self) -> Result {
        let mut state = self.sections.state.borrow_mut();
        let Some(open) = &mut state.open else {
            return Ok(());
        };
        let kept = std::mem::replace(&mut open.kept, KeptCalls::Nothing);
        let records = open.records;
        drop(state);
        self.device.keeps_back.set(false);
        let (calls, count) = match &kept {
            KeptCalls::Nothing => return Ok(()),
            KeptCalls::New(calls) => (calls, calls.len()),
            // The graph is dropped; the next run of the section is captured anew.
            KeptCalls::KnownGraph(known, at) => (&known.calls, *at),
        };
        self.device.streams.gather().map_err(refused)?;
        self.device.streams.fork().map_err(refused)?;
        self.carry_out(calls, count, &mut Order::Direct(records))
    }

    /// Ends a section: launches its graph, or makes the calls that are left.
    pub(super) fn close_section(&self, is_whole: bool) -> Result {
        let is_done = {
            let state = self.sections.state.borrow();
            match &state.open {
                None => return Ok(()),
                Some(Open { kept, .. }) => match kept {
                    KeptCalls::Nothing => false,
                    KeptCalls::New(calls) => is_whole && calls.len() > 0,
                    KeptCalls::KnownGraph(known, at) => is_whole && *at == known.calls.len(),
                },
            }
        };
        if !is_done {
            let left = self.let_go();
            self.sections.state.borrow_mut().open = None;
            return left;
        }
        self.device.keeps_back.set(false);
        let open = self.sections.state.borrow_mut().open.take();
        let Open {
            section,
            records,
            kept,
        } = open.expect("it was open above");
        let known = match kept {
            KeptCalls::KnownGraph(known, _) => known,
            KeptCalls::New(calls) => match self.capture(section, &calls) {
                Some(graph) => KnownGraph { calls, graph },
                None => {
                    self.device.streams.gather().map_err(refused)?;
                    self.device.streams.fork().map_err(refused)?;
                    return self.carry_out(&calls, calls.len(), &mut Order::Direct(records));
                }
            },
            KeptCalls::Nothing => unreachable!("nothing is done then"),
        };
        let streams = &self.device.streams;
        let counted = streams.make_room_for(Queue::Compute, known.calls.len());
        let launched = counted.and_then(|()| self.launch_graph(&known.graph, &records));
        self.sections
            .state
            .borrow_mut()
            .known
            .insert(section, known);
        launched
    }

    /// Launches a graph after all earlier work, and makes all later work wait for it.
    fn launch_graph(&self, graph: &Graph, records: &Records) -> Result {
        let streams = &self.device.streams;
        streams.check()?;
        streams.gather().map_err(refused)?;
        graph.launch(self.device.stream).map_err(refused)?;
        streams.fork().map_err(refused)?;
        streams.all_recorded(records).map_err(refused)
    }

    /// Captures a graph of calls. None if the driver refuses, which is remembered.
    fn capture(&self, section: Section, calls: &Calls) -> Option<Graph> {
        let captured = self.capture_calls(calls);
        let mut state = self.sections.state.borrow_mut();
        *state.captures.entry(section).or_default() += 1;
        match captured {
            Ok(graph) => Some(graph),
            Err(error) => {
                state.refusal = Some(error.message);
                None
            }
        }
    }

    fn capture_calls(&self, calls: &Calls) -> Result<Graph> {
        let streams = &self.device.streams;
        let capture = Capture::begin(self.device.stream).map_err(refused)?;
        streams.fork().map_err(refused)?;
        let mut order = Order::Captured(Default::default());
        self.carry_out(calls, calls.len(), &mut order)?;
        streams.gather().map_err(refused)?;
        capture.end().map_err(refused)
    }

    /// Makes the first `count` calls.
    fn carry_out(&self, calls: &Calls, count: usize, order: &mut Order) -> Result {
        calls.first(count).try_for_each(|call| {
            if let Order::Direct(_) = order {
                self.device.streams.make_room_for(Queue::Compute, 1)?;
            }
            self.carry_out_one(calls, call, order)
        })
    }

    fn carry_out_one(&self, calls: &Calls, call: &Call, order: &mut Order) -> Result {
        match call {
            Call::Launch {
                queue,
                kernel,
                grid,
                block,
                shared_bytes,
                arguments,
            } => {
                let launch = Launch {
                    queue: *queue,
                    kernel: *kernel,
                    grid: *grid,
                    block: *block,
                    shared_bytes: *shared_bytes,
                    arguments: calls.arguments(arguments),
                };
                // SAFETY: the caller of `Driver::launch` promised it for the call's place in the order of its queue.
                unsafe { self.launch_now(&launch) }
            }
            // SAFETY: as above.
            Call::Gemm(place) => unsafe {
                let (gemm, workspace) = calls.gemm(*place);
                self.products.compute(gemm, *workspace, self.device.stream)
            },
            // SAFETY: as above.
            Call::Clear { to, bytes } => unsafe { self.clear_now(*to, *bytes) },
            Call::Copy {
                queue,
                to,
                from,
                bytes,
            } => {
                // SAFETY: as above.
                unsafe { self.device.streams.copy(*queue, *to, *from, *bytes) }
            }
            Call::Record(queue) => self.record_in(*queue, order),
            Call::Wait { queue, of, record } => self.wait_in(*queue, (*of, *record), order),
        }
    }

    fn record_in(&self, queue: Queue, order: &mut Order) -> Result {
        match order {
            Order::Direct(_) => self.device.streams.record(queue).map(|_| ()),
            Order::Captured(events) => {
                let event = Event::new().map_err(refused)?;
                event
                    .record(self.device.streams.of(queue))
                    .map_err(refused)?;
                events[queue as usize].push(event);
                Ok(())
            }
        }
    }

    fn wait_in(&self, queue: Queue, (of, record): (Queue, u64), order: &mut Order) -> Result {
        match order {
            Order::Direct(records) => {
                let event = records.event(of, record);
                self.device.streams.wait(queue, event)
            }
            Order::Captured(_) if of == queue => Ok(()),
            Order::Captured(events) => {
                let event = &events[of as usize][record as usize - 1];
                let waited = event.hold_back(self.device.streams.of(queue));
                waited.map_err(refused)
            }
        }
    }
}

fn refused(error: DriverError) -> KernelError {
    error::of_driver("graph")(error)
}
