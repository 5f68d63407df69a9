//! What an engine does.

use crate::GroupError;
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

// SAFETY: they are addresses; what may be done with them, and when, is promised where they are handed over.
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

    /// Sends and receives bytes of host memory, and returns when all have gone and come. What two ranks send each other
    /// arrives in the order of the lists, each piece in one of as many bytes. What a rank sends itself is copied.
    ///
    /// # Safety
    /// The memory is alive and, while this runs, written by nothing else; what comes overlaps nothing.
    ///
    /// # Errors
    /// [`GroupError`] if the engine fails, or other ranks do not answer before the deadline.
    unsafe fn exchange(&self, sends: &[Outgoing], receives: &[Incoming]) -> Result<(), GroupError>;

    /// The bytes of all ranks, in their order; each may have as many as it likes. From any thread, beside exchanges.
    ///
    /// # Errors
    /// As for [`Group::exchange`].
    fn share(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, GroupError>;

    /// Bytes that were handed to the engine's library for other ranks by [`Group::exchange`], counted at that call.
    fn sent_bytes(&self) -> u64;

    /// Ends all ranks, this one with `code`; within seconds, even where a library hangs. Returns in an engine of threads alone.
    fn abort(&self, code: i32);

    /// Leaves the group in order, within seconds; nothing may be asked of it afterwards. For the good end of a process that does
    /// not drop what it holds: launchers take a rank for failed that ends without it.
    fn leave(&self) {}

    /// What moves device memory, where this engine does.
    fn on_device(&self) -> Option<&dyn DeviceGroup> {
        None
    }
}

/// Bytes of device memory between ranks, in a stream.
pub trait DeviceGroup: Send + Sync {
    /// Asks for an exchange in a stream (`cudaStream_t`); else as [`Group::exchange`]. Pieces that all ranks have one behind the
    /// other in `receives`, as many bytes each, and that are sent to all, go as one gathering of the library. A rank may leave
    /// out its own piece where that is in its place already.
    ///
    /// # Safety
    /// As for [`Group::exchange`], from this call until the stream is done with it.
    ///
    /// # Errors
    /// [`GroupError`] if the library refuses it, or an earlier exchange failed.
    unsafe fn enqueue(
        &self,
        stream: *mut c_void,
        sends: &[Outgoing],
        receives: &[Incoming],
    ) -> Result<(), GroupError>;

    /// Whether an exchange that was asked for has failed meanwhile.
    ///
    /// # Errors
    /// [`GroupError`] with what the library says.
    fn check(&self) -> Result<(), GroupError>;

    /// How long a host may wait for what was asked for; then other ranks are late.
    fn timeout(&self) -> Duration;

    /// Bytes of GPU memory that the library holds, on the rank where it holds most. They are measured when the group starts,
    /// after its first exchanges and gatherings.
    fn device_bytes(&self) -> u64;
}
