//! The device's queues, and the events that order them. Each queue is a stream, except a disk's, which are threads.
//!
//! A thread waits for a stream by querying its event. A stream waits for a thread through a number in pinned memory,
//! which the thread raises. The host takes no part, so it may be far ahead. (A host function in the stream would do for
//! one queue. But such functions may run one after the other across all streams, so one that waits could block the one
//! that it waits for.) Only [`Streams::synchronize`] may make the driver wait for all streams while a file is read or
//! written, and it waits for the threads too.

use super::calls::Records;
use super::{error, handles};
use crate::exchange::{group_failed, without_group};
use crate::workers::Workers;
use crate::{DiskCopy, Event, Exchange, KernelError, Queue, Result};
use collectives::{Group, GroupError};
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUresult};
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A stream for each queue that is not a worker's.
pub(super) struct Streams {
    // Dropped first: a stream waits for its work, which may need the workers.
    streams: Vec<handles::Stream>,
    histories: [RefCell<History>; STREAMS],
    ahead: [RefCell<Ahead>; STREAMS],
    /// CUDA events that are over, to be recorded again.
    idle: RefCell<Vec<handles::Event>>,
    /// The queues of the disk.
    workers: Workers,
    /// How much of each disk queue's work is done, for streams to wait on.
    done: Arc<handles::Counters>,
    /// Deadline for work that involves no other rank.
    pub(super) patience: Cell<Duration>,
    /// The group for exchanges. After a failed exchange, or work that never ends, nothing more is enqueued.
    group: RefCell<Option<Arc<dyn Group>>>,
    failed: OnceCell<KernelError>,
    context: handles::Current,
}

/// The number of queues that are streams; they come first.
const STREAMS: usize = 5;

/// The streams of a section besides the computation's: all others.
fn beside() -> impl Iterator<Item = Queue> {
    let streams = Queue::ALL[..STREAMS].iter().copied();
    streams.filter(|queue| *queue != Queue::Compute)
}

/// Gives every stream its own connection to the GPU, unless the environment sets their number. By default there are 8,
/// which streams share, and then a wait in one stream holds up work in another. The driver reads the variable when it
/// starts.
///
/// # Safety
/// No other thread of this process runs.
pub unsafe fn separate_connections() {
    const NAME: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    if std::env::var_os(NAME).is_none() {
        // SAFETY: the caller's promise.
        unsafe { std::env::set_var(NAME, "32") };
    }
}

/// How long a thread waits between two queries of an event: a hundredth of a read's or write's time. The host asks without
/// pause at first.
const POLL: Duration = Duration::from_micros(50);
const ASKED_AT_ONCE: Duration = Duration::from_millis(1);

/// How long work may take, unless it is known to take longer, before it counts as never ending.
const PATIENCE: Duration = Duration::from_secs(60);

/// A mark is recorded in a stream every so many calls, and the host waits for the mark before it, so it is at most twice as
/// far ahead of the device. A driver takes about a thousand, and then
/// holds the caller up, who would wait without a deadline behind an exchange with a rank that is gone.
const CALLS_AHEAD: usize = 150;

/// How far the host is ahead of a stream.
#[derive(Default)]
struct Ahead {
    /// Calls since the last mark.
    calls: usize,
    mark: Option<handles::Event>,
}

/// The events recorded in a stream.
#[derive(Default)]
struct History {
    /// Number of events so far.
    recorded: u64,
    /// Events that were not over at the last query, in order. Workers that wait for one share it.
    pending: VecDeque<(u64, Arc<handles::Event>)>,
}

impl History {
    fn push(&mut self, queue: Queue, event: Arc<handles::Event>) -> Event {
        self.recorded += 1;
        let position = self.recorded;
        self.pending.push_back((position, event));
        Event { queue, position }
    }
}

/// Whether a queue is a thread.
pub(super) fn is_worker(queue: Queue) -> bool {
    matches!(queue, Queue::DiskRead | Queue::DiskWrite)
}

impl Streams {
    /// Makes streams of the current context. The computation's stream has priority: an update beside it may wait, while
    /// work that waits for the computation may not. Exchanges have priority too, since they are a few blocks and all
    /// other ranks wait for them.
    pub(super) fn new() -> Result<Streams, DriverError> {
        let streams = Queue::ALL[..STREAMS].iter().map(|queue| match queue {
            Queue::Compute | Queue::Collective => handles::Stream::first(),
            _ => handles::Stream::new(),
        });
        let done = Arc::new(handles::Counters::new(Queue::ALL.len())?);
        let told = done.clone();
        Ok(Streams {
            streams: streams.collect::<Result<_, _>>()?,
            histories: Default::default(),
            ahead: Default::default(),
            idle: RefCell::default(),
            workers: Workers::new(
                Box::new(move |queue, position| {
                    told.set(queue as usize, position as u32);
                }),
                None,
            ),
            done,
            patience: Cell::new(PATIENCE),
            group: RefCell::default(),
            failed: OnceCell::new(),
            context: handles::Current::new()?,
        })
    }

    /// Makes the streams' context current in this thread.
    pub(super) fn enter(&self) -> Result<(), DriverError> {
        self.context.set()
    }

    /// The stream of a queue that is not a worker's.
    pub(super) fn of(&self, queue: Queue) -> sys::CUstream {
        self.streams[queue as usize].handle()
    }

    /// # Safety
    /// As for [`crate::cuda::Driver::start_copy`].
    pub(super) unsafe fn copy(
        &self,
        queue: Queue,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
    ) -> Result {
        self.check()?;
        let stream = self.of(queue);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let asked = unsafe {
            match queue {
                Queue::Upload => sys::cuMemcpyHtoDAsync_v2(to as u64, from.cast(), bytes, stream),
                Queue::Download => sys::cuMemcpyDtoHAsync_v2(to.cast(), from as u64, bytes, stream),
                _ => unreachable!("copies have queues of their own"),
            }
        };
        asked.result().map_err(error::of_driver("start_copy"))
    }

    /// # Safety
    /// As for [`crate::cuda::Driver::start_disk`].
    pub(super) unsafe fn disk(&self, copy: DiskCopy) -> Result {
        self.check()?;
        // SAFETY: the caller's promise.
        unsafe { self.workers.disk(copy) }
    }

    /// Sets the group for later exchanges.
    pub(super) fn join(&self, group: Arc<dyn Group>) {
        self.group.replace(Some(group));
    }

    /// This device's rank in its group; 0 without one.
    pub(super) fn rank(&self) -> usize {
        let group = self.group.borrow();
        group.as_ref().map_or(0, |group| group.rank())
    }

    /// # Safety
    /// As for [`crate::Backend::ask`].
    pub(super) unsafe fn exchange(&self, exchange: Exchange) -> Result {
        self.check()?;
        let group = self.group.borrow();
        let group = group.as_deref().ok_or_else(without_group)?;
        let (sends, receives) = exchange.pieces(group)?;
        let Some(on_device) = group.on_device() else {
            KernelError::unless(group.size() == 1, "exchange", || {
                format!("{} moves no device memory", group.engine())
            })?;
            // SAFETY: the caller's promise.
            let copied = unsafe { self.copy_own(&exchange) };
            return copied.map_err(error::of_driver("exchange"));
        };
        self.make_room_for(Queue::Collective, 1)?;
        let stream = self.of(Queue::Collective).cast();
        // SAFETY: the caller's promise; the stream lives as long as its device.
        let asked = unsafe { on_device.enqueue(stream, &sends, &receives) };
        asked.map_err(|error| self.note(error))
    }

    /// Copies what the only rank sends to itself; that needs no library.
    ///
    /// # Safety
    /// As for [`crate::Backend::ask`].
    unsafe fn copy_own(&self, exchange: &Exchange) -> Result<(), DriverError> {
        let stream = self.of(Queue::Collective);
        for ((_, x), (_, out)) in exchange.sends.iter().zip(&exchange.receives) {
            let (to, from, bytes) = (out.pointer() as u64, x.pointer() as u64, x.bytes());
            if bytes > 0 {
                // SAFETY: the caller's promise: both have as many bytes.
                unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream) }.result()?;
            }
        }
        Ok(())
    }

    /// Remembers why an exchange failed. The first failure is kept, because others may follow from it.
    fn note(&self, error: GroupError) -> KernelError {
        self.failed.get_or_init(|| group_failed(error)).clone()
    }

    /// Refuses further calls after a failed exchange, or after a failed file once no work is running.
    pub(super) fn check(&self) -> Result {
        self.workers.check().inspect_err(|_| {
            for queue in &Queue::ALL[..STREAMS] {
                // That a file failed came first.
                let _ = self.synchronize(*queue);
            }
        })?;
        self.check_exchanges()
    }

    fn check_exchanges(&self) -> Result {
        let group = self.group.borrow();
        let on_device = group.as_deref().and_then(|group| group.on_device());
        let asked = on_device.map_or(Ok(()), |on_device| on_device.check());
        asked.map_err(|error| self.note(error))?;
        self.failed.get().cloned().map_or(Ok(()), Err)
    }

    /// Waits until an event is over. If other ranks are gone, or work never ends, it never is; then waits until the group
    /// reports that, or the time for it ends.
    pub(super) fn come(&self, event: &handles::Event, operation: &'static str) -> Result {
        self.wait_for(event)?.map_err(error::of_driver(operation))
    }

    /// As [`Streams::come`], with what the driver says inside.
    fn wait_for(&self, event: &handles::Event) -> Result<Result<(), DriverError>> {
        let (begun, timeout) = (Instant::now(), self.timeout());
        loop {
            match event.query() {
                Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => self.check_exchanges()?,
                come => return Ok(come),
            }
            let waited = begun.elapsed();
            if waited > timeout.unwrap_or(self.patience.get()) {
                return Err(match timeout {
                    Some(_) => self.give_up(waited),
                    None => self.failed.get_or_init(|| never_ends(waited)).clone(),
                });
            }
            match waited < ASKED_AT_ONCE {
                true => std::thread::yield_now(),
                false => std::thread::sleep(POLL),
            }
        }
    }

    /// The deadline for other ranks is over: ends what waits for them, so that the device goes idle.
    fn give_up(&self, waited: Duration) -> KernelError {
        let error = self.note(self.late(waited));
        let group = self.group.borrow();
        if let Some(on_device) = group.as_deref().and_then(|group| group.on_device()) {
            on_device.give_up();
        }
        error
    }

    /// Waits until a stream has room for so many more calls, so that not too much is ahead of the device.
    pub(super) fn make_room_for(&self, queue: Queue, calls: usize) -> Result {
        let mut ahead = self.ahead[queue as usize].borrow_mut();
        ahead.calls += calls;
        if ahead.calls < CALLS_AHEAD {
            return Ok(());
        }
        ahead.calls = 0;
        let marked = self.idle_event().and_then(|mark| {
            mark.record(self.of(queue))?;
            Ok(mark)
        });
        let mark = marked.map_err(error::of_driver("launch"))?;
        if let Some(before) = ahead.mark.replace(mark) {
            self.come(&before, "launch")?;
            self.idle.borrow_mut().push(before);
        }
        Ok(())
    }

    /// How long the host may wait; none if it waits for no other rank.
    fn timeout(&self) -> Option<Duration> {
        let group = self.group.borrow();
        let on_device = group.as_deref()?.on_device()?;
        Some(on_device.timeout())
    }

    fn late(&self, waited: Duration) -> GroupError {
        GroupError::Late(format!(
            "rank {} has waited {} s for its device, which waits for other ranks; a rank that is slow rather than gone needs \
             a longer collectives.timeout_s",
            self.rank(),
            waited.as_secs()
        ))
    }

    /// Records the present end of a queue.
    pub(super) fn record(&self, queue: Queue) -> Result<Event> {
        self.check()?;
        if is_worker(queue) {
            return self.workers.record(queue);
        }
        self.record_stream(queue)
            .map_err(error::of_driver("record"))
    }

    fn record_stream(&self, queue: Queue) -> Result<Event, DriverError> {
        self.forget_over(queue);
        let event = self.idle_event()?;
        event.record(self.of(queue))?;
        let mut history = self.histories[queue as usize].borrow_mut();
        Ok(history.push(queue, Arc::new(event)))
    }

    /// Drops the events of a queue that are over.
    fn forget_over(&self, queue: Queue) {
        let mut history = self.histories[queue as usize].borrow_mut();
        let over = |first: &(u64, Arc<handles::Event>)| first.1.has_come();
        while history.pending.front().is_some_and(over) {
            let first = history.pending.pop_front();
            let event = first.and_then(|(_, event)| Arc::into_inner(event));
            self.idle.borrow_mut().extend(event);
        }
    }

    /// An event that nothing waits for.
    fn idle_event(&self) -> Result<handles::Event, DriverError> {
        match self.idle.borrow_mut().pop() {
            Some(event) => Ok(event),
            None => handles::Event::new(),
        }
    }

    /// The number of records of each stream.
    pub(super) fn recorded(&self) -> [u64; Queue::ALL.len()] {
        let of = |queue| match self.histories.get(queue as usize) {
            Some(history) => history.borrow().recorded,
            None => 0,
        };
        Queue::ALL.map(of)
    }

    /// Makes the computation wait for all other streams.
    pub(super) fn gather(&self) -> Result<(), DriverError> {
        beside().try_for_each(|queue| self.order(queue, Queue::Compute))
    }

    /// Makes all other streams wait for the computation.
    pub(super) fn fork(&self) -> Result<(), DriverError> {
        beside().try_for_each(|queue| self.order(Queue::Compute, queue))
    }

    /// Makes one stream wait for the present end of another. The wait keeps the event's present place, so the event can
    /// be recorded elsewhere at once.
    fn order(&self, first: Queue, then: Queue) -> Result<(), DriverError> {
        self.order_streams(self.of(first), self.of(then))
    }

    /// The same for any two streams of the context.
    pub(super) fn order_streams(
        &self,
        first: sys::CUstream,
        then: sys::CUstream,
    ) -> Result<(), DriverError> {
        let event = self.idle_event()?;
        event.record(first)?;
        event.hold_back(then)?;
        self.idle.borrow_mut().push(event);
        Ok(())
    }

    /// All records of a section are over at the present end of the computation, which all streams wait for.
    pub(super) fn all_recorded(&self, records: &Records) -> Result<(), DriverError> {
        let end = self.idle_event()?;
        end.record(self.of(Queue::Compute))?;
        let end = Arc::new(end);
        for queue in &Queue::ALL[..STREAMS] {
            self.forget_over(*queue);
            let mut history = self.histories[*queue as usize].borrow_mut();
            for _ in 0..records.count(*queue) {
                history.push(*queue, end.clone());
            }
        }
        Ok(())
    }

    /// The CUDA event of a stream's event; none if it is over.
    fn pending(&self, event: Event) -> Option<Arc<handles::Event>> {
        let history = self.histories[event.queue as usize].borrow();
        let first = history.pending.front()?.0;
        let index = event.position.checked_sub(first)?;
        let (_, event) = history.pending.get(index as usize)?;
        Some(event.clone())
    }

    /// Makes a queue wait for an event of another.
    pub(super) fn wait(&self, queue: Queue, event: Event) -> Result {
        self.check()?;
        match (is_worker(queue), is_worker(event.queue)) {
            (true, true) => self.workers.wait(queue, event),
            (true, false) => match self.pending(event) {
                Some(pending) => self.worker_waits(queue, pending),
                None => Ok(()),
            },
            (false, true) if self.workers.is_over(event) => Ok(()),
            (false, true) => self
                .done
                .wait(self.of(queue), event.queue as usize, event.position as u32)
                .map_err(error::of_driver("wait")),
            (false, false) => self
                .stream_waits(queue, event)
                .map_err(error::of_driver("wait")),
        }
    }

    fn stream_waits(&self, queue: Queue, event: Event) -> Result<(), DriverError> {
        match self.pending(event) {
            Some(pending) if event.queue != queue => pending.hold_back(self.of(queue)),
            _ => Ok(()),
        }
    }

    /// Keeps the event from being recorded again until the worker has passed it.
    fn worker_waits(&self, queue: Queue, event: Arc<handles::Event>) -> Result {
        let context = self.context;
        let wait = move || {
            context.set()?;
            loop {
                match event.query() {
                    Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => std::thread::sleep(POLL),
                    come => return come,
                }
            }
        };
        let wait = move || wait().map_err(error::of_driver("wait"));
        self.workers.wait_for_point(queue, Box::new(wait))
    }

    /// Waits until an event is over.
    pub(super) fn finish(&self, event: Event) -> Result {
        if is_worker(event.queue) {
            let finished = self.workers.finish(event);
            return self.check().and(finished);
        }
        let pending = self.pending(event);
        let come = pending.map_or(Ok(()), |pending| self.come(&pending, "finish"));
        self.check().and(come)
    }

    /// Whether an event is over, without waiting.
    pub(super) fn is_over(&self, event: Event) -> bool {
        match is_worker(event.queue) {
            true => self.workers.is_over(event),
            false => self.pending(event).is_none_or(|pending| pending.has_come()),
        }
    }

    /// Waits for all work enqueued in a queue, as long as for an event.
    pub(super) fn synchronize(&self, queue: Queue) -> Result<(), DriverError> {
        if is_worker(queue) {
            self.workers.synchronize(queue);
            return Ok(());
        }
        let end = self.idle_event()?;
        end.record(self.of(queue))?;
        // Why it does not end is told by the next call.
        let never = DriverError(CUresult::CUDA_ERROR_LAUNCH_TIMEOUT);
        let come = self.wait_for(&end).unwrap_or(Err(never));
        self.idle.borrow_mut().push(end);
        come
    }

    /// Whether an exchange failed or work never ended: a call of the driver that waits for it might not return.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.get().is_some()
    }
}

fn never_ends(waited: Duration) -> KernelError {
    KernelError::device(
        "finish",
        format!(
            "the GPU has not ended what it was asked for in {} s: a kernel that never ends, or a GPU that hangs; look at dmesg \
             (Xid) and nvidia-smi, and go on with `--resume latest`, on another GPU if it happens again",
            waited.as_secs()
        ),
    )
}

impl Drop for Streams {
    /// Streams wait for their work when they go. Where that never ends, they stay, with what they read.
    fn drop(&mut self) {
        if self.has_failed() {
            std::mem::forget(std::mem::take(&mut self.streams));
            std::mem::forget(self.done.clone());
        }
    }
}
