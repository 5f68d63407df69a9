//! The interface of an engine.

use crate::Result;
use std::ffi::c_void;
use std::time::Duration;

/// Bytes that go to a rank.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing {
    /// The rank, which may be this one.
    pub to: usize,
    /// The first byte.
    pub pointer: *const u8,
    /// How many.
    pub bytes: usize,
}

/// Bytes that come from a rank.
#[derive(Clone, Copy, Debug)]
pub struct Incoming {
    /// The rank, which may be this one.
    pub from: usize,
    /// The first byte.
    pub pointer: *mut u8,
    /// How many.
    pub bytes: usize,
}

// SAFETY: they are addresses; whoever hands them over promises what may be done with the memory, and when.
unsafe impl Send for Outgoing {}
// SAFETY: as above.
unsafe impl Send for Incoming {}

/// The ranks of a job, as one of them sees them. All ranks make the same calls in the same order.
pub trait Group: Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn size(&self) -> usize;

    /// What moves the bytes, for people: `Open MPI 4.1.4`.
    fn engine(&self) -> String;

    /// Sends and receives bytes of host memory, and returns when all are sent and received. Between two ranks the n-th
    /// piece sent goes into the n-th received, which must have as many bytes. What a rank sends to itself is copied.
    ///
    /// # Safety
    /// The memory is alive and nothing else writes it while this runs; received pieces overlap no other piece.
    ///
    /// # Errors
    /// `GroupError` if the engine fails, or other ranks do not answer before the deadline.
    unsafe fn exchange(&self, sends: &[Outgoing], receives: &[Incoming]) -> Result;

    /// The bytes of all ranks, in their order; each may share any number. Any thread may call it, also during
    /// exchanges.
    ///
    /// # Errors
    /// As for [`Group::exchange`].
    fn share(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>>;

    /// Bytes that [`Group::exchange`] gave the engine's library for other ranks, counted when they were given.
    fn sent_bytes(&self) -> u64;

    /// Lets waits for other ranks that begin from now on take at least so long.
    fn raise_timeout(&self, _: Duration) {}

    /// Ends all ranks within seconds, this one with `code`, even if a library hangs. Returns only if ranks are threads.
    fn abort(&self, code: i32);

    /// Leaves the group in order, within seconds; the group must not be used afterwards. A process that ends without
    /// dropping the group calls this first, since launchers report a rank as failed that ends without leaving.
    fn leave(&self) {}

    /// The part that moves device memory, if this engine can.
    fn on_device(&self) -> Option<&dyn DeviceGroup> {
        None
    }
}

/// Bytes of device memory between ranks, in a stream.
pub trait DeviceGroup: Send + Sync {
    /// Queues an exchange in a stream (`cudaStream_t`); otherwise as [`Group::exchange`]. If every rank sends one piece
    /// to all, all of the same size, and `receives` has them side by side, it is one gathering of the library. A rank
    /// may leave out its own piece if that is already in its place.
    ///
    /// # Safety
    /// As for [`Group::exchange`], from this call until the stream is done with it.
    ///
    /// # Errors
    /// `GroupError` if the library refuses the exchange, or an earlier one failed.
    unsafe fn enqueue(
        &self,
        stream: *mut c_void,
        sends: &[Outgoing],
        receives: &[Incoming],
    ) -> Result;

    /// Whether a queued exchange has failed since.
    ///
    /// # Errors
    /// `GroupError` with what the library says.
    fn check(&self) -> Result;

    /// How long the host may wait for a queued exchange; after that other ranks count as late.
    fn timeout(&self) -> Duration;

    /// Ends queued exchanges by force, because their deadline is over: the device waits no longer for ranks that are gone, nor does
    /// a call of its driver. Takes seconds at most. Every later call of the group fails.
    fn give_up(&self);

    /// Bytes of GPU memory that the library holds, on the rank where it holds most. They are measured when the group starts,
    /// after its first exchanges and gatherings.
    fn device_bytes(&self) -> u64;
}
