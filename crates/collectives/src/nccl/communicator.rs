//! An NCCL communicator whose calls return before they are done, so that waiting for one can time out.

use super::gathering::Gathering;
use super::library::{CommConfig, Handle, INT8, NcclLibrary, UniqueId};
use crate::{Incoming, Outgoing, Patience, Result};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Pause between two polls of a communicator.
const SLEEP: Duration = Duration::from_micros(50);

/// The ranks of a job on their GPUs.
pub(super) struct Communicator {
    nccl: &'static NcclLibrary,
    handle: Handle,
    rank: usize,
    size: usize,
    patience: Patience,
    /// Held while an exchange is queued: one at a time.
    asking: Mutex<()>,
    is_aborted: AtomicBool,
}

// SAFETY: NCCL lets any thread use a communicator, one at a time, except for reading its state and aborting it.
unsafe impl Send for Communicator {}
// SAFETY: as above; `asking` lets one thread in at a time.
unsafe impl Sync for Communicator {}

/// Where NCCL writes a communicator. It may write there long after the wait for a call timed out, so the memory is
/// never freed.
fn slot() -> &'static AtomicPtr<c_void> {
    Box::leak(Box::default())
}

impl Communicator {
    /// Meets the other ranks on the device of the calling thread's context.
    pub(super) fn new(
        nccl: &'static NcclLibrary,
        id: UniqueId,
        [rank, size]: [usize; 2],
        patience: &Patience,
    ) -> Result<Communicator> {
        let (slot, mut config) = (slot(), CommConfig::non_blocking());
        // SAFETY: the handle is written before it returns, and perhaps again later; the configuration is read.
        let code = unsafe {
            let init = nccl.functions.comm_init_rank_config;
            init(slot.as_ptr(), size as c_int, id, rank as c_int, &mut config)
        };
        let handle = slot.load(Ordering::Acquire);
        nccl.checked(handle, "ncclCommInitRankConfig", code)?;
        let asking = Mutex::new(());
        let made = Communicator {
            nccl,
            handle,
            rank,
            size,
            patience: patience.clone(),
            asking,
            is_aborted: AtomicBool::new(false),
        };
        made.wait_until_queued("ncclCommInitRankConfig")?;
        Ok(made)
    }

    /// Waits until the last call is complete: its work is queued.
    fn wait_until_queued(&self, what: &str) -> Result {
        let begun = Instant::now();
        while !self.nccl.is_settled(self.handle, what)? {
            if begun.elapsed() > self.patience.timeout() {
                let others = (0..self.size).filter(|rank| *rank != self.rank);
                return Err(self.patience.late(self.rank, what, others));
            }
            std::thread::sleep(SLEEP);
        }
        Ok(())
    }

    /// Queues an exchange in a stream. Returns, once it is queued, the number of bytes that the library was given for
    /// other ranks.
    ///
    /// # Safety
    /// As for [`crate::DeviceGroup::enqueue`].
    pub(super) unsafe fn enqueue(
        &self,
        stream: *mut c_void,
        sends: &[Outgoing],
        receives: &[Incoming],
    ) -> Result<u64> {
        let _turn = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        let functions = &self.nccl.functions;
        if let Some(Gathering { from, to, bytes }) =
            Gathering::of([self.rank, self.size], sends, receives)
        {
            // SAFETY: the caller's promise.
            let code = unsafe {
                (functions.all_gather)(from.cast(), to.cast(), bytes, INT8, self.handle, stream)
            };
            self.nccl.checked(self.handle, "ncclAllGather", code)?;
            self.wait_until_queued("ncclAllGather")?;
            return Ok((bytes * (self.size - 1)) as u64);
        }
        // SAFETY: the group that begins here ends below, also after an error in between.
        let begun = unsafe { (functions.group_start)() };
        self.nccl.checked(self.handle, "ncclGroupStart", begun)?;
        // SAFETY: the caller's promise.
        let asked = unsafe { self.ask(stream, sends, receives) };
        // SAFETY: it was begun above.
        let ended = unsafe { (functions.group_end)() };
        let sent = asked?;
        self.nccl.checked(self.handle, "ncclGroupEnd", ended)?;
        self.wait_until_queued("an exchange")?;
        Ok(sent)
    }

    /// Queues the pieces one by one. Both ends leave out empty pieces.
    ///
    /// # Safety
    /// As for [`Communicator::enqueue`].
    unsafe fn ask(
        &self,
        stream: *mut c_void,
        sends: &[Outgoing],
        receives: &[Incoming],
    ) -> Result<u64> {
        let functions = &self.nccl.functions;
        let mut sent = 0;
        for piece in sends.iter().filter(|piece| piece.bytes > 0) {
            let (from, to) = (piece.pointer.cast(), piece.to as c_int);
            // SAFETY: the caller's promise.
            let code =
                unsafe { (functions.send)(from, piece.bytes, INT8, to, self.handle, stream) };
            self.nccl.checked(self.handle, "ncclSend", code)?;
            if piece.to != self.rank {
                sent += piece.bytes as u64;
            }
        }
        for piece in receives.iter().filter(|piece| piece.bytes > 0) {
            let (to, from) = (piece.pointer.cast(), piece.from as c_int);
            // SAFETY: as above.
            let code =
                unsafe { (functions.recv)(to, piece.bytes, INT8, from, self.handle, stream) };
            self.nccl.checked(self.handle, "ncclRecv", code)?;
        }
        Ok(sent)
    }

    /// Whether a queued exchange has failed since.
    pub(super) fn check(&self) -> Result {
        self.nccl.is_settled(self.handle, "an exchange").map(|_| ())
    }

    /// Ends it in order, with the other ranks; may hang.
    pub(super) fn end(&self) -> Result {
        // SAFETY: the communicator is alive, and not used after this.
        unsafe {
            let code = (self.nccl.functions.comm_finalize)(self.handle);
            self.nccl.checked(self.handle, "ncclCommFinalize", code)?;
            self.wait_until_queued("ncclCommFinalize")?;
            let code = (self.nccl.functions.comm_destroy)(self.handle);
            self.nccl
                .checked(std::ptr::null_mut(), "ncclCommDestroy", code)
        }
    }

    /// Aborts whatever it is doing, once; may hang. It must not be used afterwards.
    pub(super) fn abort(&self) {
        if !self.is_aborted.swap(true, Ordering::Relaxed) {
            // SAFETY: NCCL allows this at any time. The result does not matter after an abort.
            unsafe { (self.nccl.functions.comm_abort)(self.handle) };
        }
    }
}
