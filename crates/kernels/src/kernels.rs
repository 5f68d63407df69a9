//! [`Kernels`], through which callers use a device. It checks and counts every call, then hands it to a [`Backend`].

use crate::backend;
use crate::traffic::Counts;
use crate::{
    Account, AccountScope, Backend, BlockFile, DiskCopy, Event, Exchange, ExchangeBytes, HostSide,
    KernelError, Operation, Queue, READING_BYTES_MAX, Reading, Request, Result, Section,
    StepTraffic, Target, Traffic,
};
use memory::{In, Out};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// A device, behind the one place that checks and counts every call.
///
/// [`cpu::Cpu`](crate::cpu::Cpu), [`cuda::Cuda`](crate::cuda::Cuda) and [`meta::Meta`](crate::meta::Meta) are created
/// inside one of these. `Kernels` without a type is any of them: `&Kernels<Cpu>` becomes `&Kernels`, and so do `Box`
/// and `Rc`.
///
/// # Operations
/// Each is a value of [`crate::operation`]. [`Kernels::run`] runs it.
///
/// # Copies beside the computation, and the events that order them
/// A copy reads and writes at any time between its call and the end of an event recorded later in its queue. Leases are
/// granted in the order of [`Queue::Compute`]. So device memory of a copy may be given back only after that queue has
/// been told to wait for such an event. Newly leased memory may be copied into only after the copy's queue has been
/// told to wait for an event of [`Queue::Compute`] recorded after the lease.
///
/// When a file fails, every later call returns that error ([`crate::Fault::Disk`]), and no queue has running work by
/// then. When an exchange fails, every later call fails too ([`crate::Fault::Collective`]). But data of other ranks may
/// still arrive, so the exchange's memory must stay until the process ends.
///
/// # Errors
/// Every call returns [`KernelError`] if a shape or type does not fit ([`crate::Fault::Caller`]), before anything is
/// written, or if the device fails ([`crate::Fault::Device`]).
pub struct Kernels<B: Backend + ?Sized = dyn Backend> {
    /// The rank that has number 0 in exchanges of a stage.
    first_rank: Cell<usize>,
    counts: Rc<Counts>,
    pub(crate) backend: B,
}

impl<B: Backend> Kernels<B> {
    /// Kernels of a device that runs checked calls.
    pub fn new(backend: B) -> Kernels<B> {
        Kernels {
            first_rank: Cell::new(0),
            counts: Rc::default(),
            backend,
        }
    }

    /// The backend without the checks, for methods that only this device has.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The backend without the checks, for a wrapper around it.
    pub fn into_backend(self) -> B {
        self.backend
    }
}

impl<B: Backend + ?Sized> Kernels<B> {
    /// The device whose scratch sizes apply.
    pub fn target(&self) -> Target {
        self.backend.target()
    }

    /// Copies host bytes into a contiguous tensor of as many bytes.
    ///
    /// # Errors
    /// [`KernelError`] if they do not fit, or the device fails.
    pub fn upload(&self, out: Out, bytes: &[u8]) -> Result {
        check_transfer("upload", &out.as_in(), bytes.len())?;
        self.count(Queue::Upload, bytes.len());
        // SAFETY: the tensor is contiguous and has as many bytes.
        unsafe { self.backend.write(out, bytes) }
    }

    /// Copies a contiguous tensor into as many host bytes, after all earlier work is done.
    ///
    /// # Errors
    /// [`KernelError`] if they do not fit, or the device fails or failed in earlier work.
    pub fn download(&self, bytes: &mut [u8], x: In) -> Result {
        check_transfer("download", &x, bytes.len())?;
        self.count(Queue::Download, bytes.len());
        // SAFETY: as in `upload`.
        unsafe { self.backend.read(bytes, x) }
    }

    /// Checks an operation and runs it.
    ///
    /// # Errors
    /// [`KernelError`] if a shape or type does not fit, before anything is written, or if the device fails.
    pub fn run<'a>(&self, operation: impl Into<Operation<'a>>) -> Result {
        // SAFETY: in the queue of the computation nothing is promised.
        unsafe { self.start(Queue::Compute, operation) }
    }

    /// Enqueues an operation. In [`Queue::Update`] it must be one that may run beside the computation
    /// ([`Operation::runs_beside`]); otherwise this is [`Kernels::run`].
    ///
    /// # Safety
    /// In [`Queue::Compute`] there is nothing to promise. In [`Queue::Update`], until an event recorded after this in it is
    /// over, everything in `operation` stays alive, nothing else writes it, and nothing else reads what it writes.
    ///
    /// # Errors
    /// As [`Kernels::run`], and if the operation does not run in that queue.
    pub unsafe fn start<'a>(&self, queue: Queue, operation: impl Into<Operation<'a>>) -> Result {
        let operation = operation.into();
        let runs_here = match queue {
            Queue::Compute => true,
            Queue::Update => operation.runs_beside(),
            _ => false,
        };
        KernelError::unless(runs_here, operation.name(), || {
            format!("it does not run in the queue `{}`", queue.name())
        })?;
        operation.check(self.backend.widens())?;
        operation.check_scratch(self.backend.target())?;
        // SAFETY: it was checked for this backend; the caller's promise.
        unsafe { self.backend.ask(queue, Request::Operation(operation)) }
    }

    /// Whether operations may still be unfinished when the call that asks for them returns.
    pub fn runs_ahead(&self) -> bool {
        self.backend.runs_ahead()
    }

    /// Enqueues a copy of pinned host memory to the device, in [`Queue::Upload`]. Both sides are contiguous, of the
    /// same type and number of elements.
    ///
    /// # Safety
    /// Until an event recorded after this in the queue is over, `out` and `x` stay alive, nothing else writes either,
    /// and nothing reads `out`.
    ///
    /// # Errors
    /// [`KernelError`] if the sides do not fit, or the device fails.
    pub unsafe fn start_upload(&self, out: Out, x: In) -> Result {
        check_copy("start_upload", &out, &x)?;
        self.count(Queue::Upload, x.bytes());
        // SAFETY: the caller's promise, and the sides fit.
        unsafe { self.backend.ask(Queue::Upload, Request::Copy(out, x)) }
    }

    /// Enqueues a copy of device memory to pinned host memory, in [`Queue::Download`]; otherwise as
    /// [`Kernels::start_upload`].
    ///
    /// # Safety
    /// As for [`Kernels::start_upload`].
    ///
    /// # Errors
    /// As for [`Kernels::start_upload`].
    pub unsafe fn start_download(&self, out: Out, x: In) -> Result {
        check_copy("start_download", &out, &x)?;
        self.count(Queue::Download, x.bytes());
        // SAFETY: the caller's promise, and the sides fit.
        unsafe { self.backend.ask(Queue::Download, Request::Copy(out, x)) }
    }

    /// Enqueues a read of a file from `offset` on, in [`Queue::DiskRead`]. `out` is contiguous pinned host memory.
    ///
    /// # Safety
    /// Until an event recorded after this in the queue is over, `out` stays alive, and nothing else reads or writes it.
    ///
    /// # Errors
    /// [`KernelError`] if `out` is strided, or the device or a file fails.
    pub unsafe fn start_disk_read(
        &self,
        out: Out,
        file: &Arc<dyn BlockFile>,
        offset: u64,
    ) -> Result {
        let contiguous = out.is_contiguous();
        // SAFETY: the caller's promise.
        unsafe { self.start_disk(file, offset, (HostSide::Read(out), contiguous)) }
    }

    /// Enqueues a write to a file from `offset` on, in [`Queue::DiskWrite`]. `x` is contiguous pinned host memory.
    ///
    /// # Safety
    /// Until an event recorded after this in the queue is over, `x` stays alive, and nothing writes it.
    ///
    /// # Errors
    /// As for [`Kernels::start_disk_read`].
    pub unsafe fn start_disk_write(&self, file: &Arc<dyn BlockFile>, offset: u64, x: In) -> Result {
        let contiguous = x.is_contiguous();
        // SAFETY: the caller's promise.
        unsafe { self.start_disk(file, offset, (HostSide::Write(x), contiguous)) }
    }

    /// Enqueues an exchange with other ranks, in [`Queue::Collective`]. Two ranks that exchange with each other
    /// enqueue those exchanges in the same order, each with its own pieces.
    ///
    /// # Safety
    /// Until an event recorded after this in the queue is over, all pieces stay alive, nothing else writes them, and
    /// nothing reads those that are received, which do not overlap.
    ///
    /// # Errors
    /// [`KernelError`] if a piece is strided, what a rank sends itself is not what it receives, the device was made without
    /// a group, or the device or an exchange fails.
    pub unsafe fn start_exchange(&self, exchange: Exchange) -> Result {
        let rank = self.backend.rank();
        exchange.check(rank)?;
        let bytes = exchange.bytes(rank).sent as usize;
        // SAFETY: the caller's promise, and the pieces were checked.
        unsafe {
            self.backend
                .ask(Queue::Collective, Request::Exchange(exchange))
        }?;
        self.count(Queue::Collective, bytes);
        Ok(())
    }

    /// As [`Kernels::start_exchange`], with the number of bytes known beforehand. `list` names the pieces. It is called
    /// only on devices that move them: a plan only counts bytes, so its time does not depend on the rank count.
    ///
    /// # Safety
    /// As for [`Kernels::start_exchange`].
    ///
    /// # Errors
    /// As for [`Kernels::start_exchange`], and if the pieces have other byte counts.
    pub unsafe fn start_exchange_of<'a>(
        &self,
        bytes: ExchangeBytes,
        list: Box<dyn FnOnce() -> Exchange<'a> + 'a>,
    ) -> Result {
        // SAFETY: the caller's promise.
        unsafe { self.start_counted(self.first_rank.get(), bytes, list) }
    }

    /// The same, with the numbers that ranks have among all.
    ///
    /// # Safety
    /// As for [`Kernels::start_exchange`].
    ///
    /// # Errors
    /// As for [`Kernels::start_exchange_of`].
    pub unsafe fn start_exchange_of_all<'a>(
        &self,
        bytes: ExchangeBytes,
        list: Box<dyn FnOnce() -> Exchange<'a> + 'a>,
    ) -> Result {
        if self.backend.keeps_time_with_others() {
            // SAFETY: the caller's promise.
            return unsafe { self.start_exchange(list()) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.start_counted(0, bytes, list) }
    }

    /// As [`Kernels::start_exchange_of`], with ranks that are counted from `first` on.
    unsafe fn start_counted<'a>(
        &self,
        first: usize,
        bytes: ExchangeBytes,
        list: Box<dyn FnOnce() -> Exchange<'a> + 'a>,
    ) -> Result {
        if self.backend.counts_exchange(bytes) {
            self.count(Queue::Collective, bytes.sent as usize);
            return Ok(());
        }
        let exchange = list().counted_from(first);
        exchange.check_bytes(self.backend.rank(), bytes)?;
        // SAFETY: the caller's promise.
        unsafe { self.start_exchange(exchange) }
    }

    /// Sets the rank that has number 0 in [`Kernels::start_exchange_of`]: the first of this stage of a pipeline, whose ranks exchange
    /// among themselves.
    pub fn count_ranks_from(&self, first: usize) {
        self.first_rank.set(first);
    }

    /// Enqueues a read of a small contiguous tensor, in [`Queue::Compute`].
    ///
    /// # Errors
    /// [`KernelError`] if the tensor is strided or larger than [`READING_BYTES_MAX`], or the device fails.
    pub fn start_read(&self, x: In) -> Result<Reading> {
        let bytes = x.bytes();
        let fits = x.is_contiguous() && bytes <= READING_BYTES_MAX;
        KernelError::unless(fits, "start_read", || {
            format!("a reading is contiguous and at most {READING_BYTES_MAX} bytes, not {bytes}")
        })?;
        self.count(Queue::Download, bytes);
        // SAFETY: the tensor is contiguous and small.
        unsafe { self.backend.start_reading(x) }
    }

    /// Waits for the result of [`Kernels::start_read`]. At most [`crate::READINGS_MAX`] readings may be running.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails, or failed in earlier work.
    pub fn finish_read(&self, reading: Reading) -> Result<Vec<u8>> {
        self.finish(reading.event())?;
        Ok(reading.bytes())
    }

    /// Whether a reading can be finished without waiting.
    pub fn has_come(&self, reading: &Reading) -> bool {
        self.backend.is_over(reading.event())
    }

    /// Records the present end of a queue as an event.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn record(&self, queue: Queue) -> Result<Event> {
        self.backend.record(queue)
    }

    /// Makes everything enqueued in `queue` from now on wait for an event; the caller does not wait. `reason` says what
    /// the wait ensures, for traces and tests.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn wait(&self, queue: Queue, event: Event, reason: &'static str) -> Result {
        self.backend.wait(queue, event, reason)
    }

    /// Waits until an event is over.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails, or failed in earlier work.
    pub fn finish(&self, event: Event) -> Result {
        self.backend.finish(event)
    }

    /// Does `work`, waits for what it enqueued in [`Queue::Compute`], and gives the time that this took: on a GPU by its own clock,
    /// without launches and waits of the host, elsewhere by the host's.
    ///
    /// # Errors
    /// [`KernelError`] of `work`, or if the device fails.
    pub fn timed(&self, mut work: impl FnMut() -> Result) -> Result<Duration> {
        backend::time(&self.backend, Queue::Compute, &mut work)
    }

    /// Begins a section: the calls up to [`Kernels::end_section`] will be made again under the same name, in the same
    /// order, with the same addresses. A device may keep them back until the end, and launch them all together when
    /// they come again. It compares them first, so a section that differs is slower but never wrong. Some calls cannot
    /// be kept back: uploads from memory that may change, readings, disks, exchanges, and waits of the caller. Such a
    /// call is made at once, and nothing more of the section is kept back.
    /// section is not held back any more.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn begin_section(&self, section: Section) -> Result {
        self.backend.begin_section(section)
    }

    /// Ends the current section. `is_whole` is false if it was aborted and must not be kept.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails, or failed in earlier work.
    pub fn end_section(&self, is_whole: bool) -> Result {
        self.backend.end_section(is_whole)
    }

    /// Why the device no longer launches sections as a whole, if so. Their calls are then made one by one.
    pub fn section_refusal(&self) -> Option<String> {
        self.backend.section_refusal()
    }

    /// Bytes that have crossed so far.
    pub fn traffic(&self) -> Traffic {
        let all = self.step_traffic().plus(self.traffic_of_step_before());
        all.total()
    }

    /// Bytes that have crossed so far, but for those of [`Kernels::count_to_step_before`].
    pub fn step_traffic(&self) -> StepTraffic {
        self.counts.step()
    }

    /// Bytes that have crossed so far for updates that a step left to the next one.
    pub fn traffic_of_step_before(&self) -> StepTraffic {
        self.counts.step_before()
    }

    /// Counts what crosses from now on to this account, until the scope ends.
    pub fn count_to(&self, account: Account) -> AccountScope {
        self.counts.count_to(account)
    }

    /// Counts an update that the previous step left to this one, until the scope ends. Scopes within it count to the previous step too.
    pub fn count_to_step_before(&self, account: Account) -> AccountScope {
        self.counts.count_to_step_before(account)
    }

    /// Refuses strided host memory, then counts the copy and enqueues it.
    ///
    /// # Safety
    /// As for [`Kernels::start_disk_read`] or [`Kernels::start_disk_write`].
    unsafe fn start_disk(
        &self,
        file: &Arc<dyn BlockFile>,
        offset: u64,
        (host, contiguous): (HostSide, bool),
    ) -> Result {
        KernelError::unless(contiguous, "start_disk", || {
            "the host side is strided, expected contiguous".into()
        })?;
        let copy = DiskCopy {
            file: file.clone(),
            offset,
            host,
        };
        self.count(copy.queue(), copy.bytes());
        // SAFETY: the caller's promise, and the memory is contiguous.
        unsafe { self.backend.ask(copy.queue(), Request::Disk(copy)) }
    }

    fn count(&self, queue: Queue, bytes: usize) {
        self.counts.add(queue, bytes as u64);
    }
}

/// Refuses a tensor that is strided, or whose byte count differs from the host side's.
fn check_transfer(operation: &'static str, tensor: &In, host: usize) -> Result {
    KernelError::unless(tensor.is_contiguous(), operation, || {
        "the tensor is strided, expected contiguous".into()
    })?;
    let bytes = tensor.bytes();
    KernelError::unless(bytes == host, operation, || {
        format!("the tensor has {bytes} bytes, the host side {host}")
    })
}

/// Refuses a copy whose sides are strided, or differ in type or number of elements.
fn check_copy(operation: &'static str, out: &Out, x: &In) -> Result {
    let contiguous = out.is_contiguous() && x.is_contiguous();
    KernelError::unless(contiguous, operation, || {
        "a side is strided, expected contiguous".into()
    })?;
    let sides = [(out.dtype(), out.elements()), (x.dtype(), x.elements())];
    KernelError::unless(sides[0] == sides[1], operation, || {
        format!("`out` has {:?}, `x` {:?}", sides[0], sides[1])
    })
}
