//! States that are not on the device. Their home hands them out a chunk at a time: pinned host memory, or a file (`disk.rs`).

use crate::chunks::{Away, Chunks};
use kernels::{BlockFile, KernelError, Kernels, Queue, Result};
use memory::{Buffer, Category, DType, Memory, Out, OutOfMemory};
use std::ops::Range;
use std::sync::Arc;

/// A home of states. The defaults suit chunks that are all in host memory. An update takes chunks in order.
pub(crate) trait Store {
    /// Name and bytes of its host memory.
    fn arena(&self) -> (&'static str, u64);

    /// Bytes of its file; none if the states are in memory.
    fn disk_bytes(&self) -> Option<u64> {
        None
    }

    /// Takes a file of [`Store::disk_bytes`] zeros.
    fn use_file(&mut self, _file: Arc<dyn BlockFile>) {
        unreachable!("states in memory need no file")
    }

    /// How many chunks may be on their way to the host besides those that have slots on the device.
    fn ahead(&self) -> usize {
        0
    }

    /// Starts to read a chunk into host memory.
    fn fetch(&mut self, _kernels: &Kernels, _away: &Away) -> Result {
        Ok(())
    }

    /// Makes the upload queue wait until a chunk is in host memory.
    fn fetched(&self, _kernels: &Kernels, _away: &Away) -> Result {
        Ok(())
    }

    /// A chunk's bytes in host memory, until it is put back.
    fn on_host(&mut self, away: &Away) -> Out<'_>;

    /// Puts a chunk back. The chunk is stored when the downloads enqueued so far are done, and what [`Store::last_queue`] does then.
    fn put_back(&mut self, _kernels: &Kernels, _away: &Away) -> Result {
        Ok(())
    }

    /// The queue in which chunks reach their home.
    fn last_queue(&self) -> Queue;

    /// Ends the host's access between updates. Comes before the first chunk of an update.
    fn end_host_access(&mut self) -> Result {
        Ok(())
    }

    /// Copies some bytes, between updates. All chunks are stored.
    fn read(&self, range: &Range<usize>, bytes: &mut [u8]) -> Result;

    /// A chunk's bytes, for the host to write between updates. All chunks are stored.
    fn change(&mut self, away: &Away) -> Result<Out<'_>>;
}

/// All chunks, one after the other, in pinned host memory.
pub(crate) struct PinnedStore(Buffer);

impl PinnedStore {
    /// Leases the memory, zeroed.
    pub(crate) fn lease(memory: &Memory, chunks: &Chunks) -> Result<PinnedStore, OutOfMemory> {
        let (category, dims) = (Category::OptimizerState, [chunks.away_bytes]);
        let all = memory.lease_pinned(category, "offloaded_states", dims, DType::U8)?;
        Ok(PinnedStore(all))
    }
}

impl Store for PinnedStore {
    fn arena(&self) -> (&'static str, u64) {
        ("offloaded_states", self.0.bytes())
    }

    fn on_host(&mut self, away: &Away) -> Out<'_> {
        self.0.view_mut().rows(away.place.clone())
    }

    fn last_queue(&self) -> Queue {
        Queue::Download
    }

    fn read(&self, range: &Range<usize>, bytes: &mut [u8]) -> Result {
        bytes.copy_from_slice(self.0.view().rows(range.clone()).slice());
        Ok(())
    }

    fn change(&mut self, away: &Away) -> Result<Out<'_>> {
        Ok(self.on_host(away))
    }
}

impl dyn Store + '_ {
    /// Copies ranges, one after the other, between updates.
    pub(crate) fn read_all(
        &self,
        kernels: &Kernels,
        ranges: &[Range<usize>],
        mut bytes: &mut [u8],
    ) -> Result {
        let needed: usize = ranges.iter().map(Range::len).sum();
        let given = bytes.len();
        if needed != given {
            let sizes = format!("the state has {needed} bytes, the host side {given}");
            return Err(KernelError::misfit("read", sizes));
        }
        self.finish(kernels)?;
        for range in ranges {
            let (own, rest) = bytes.split_at_mut(range.len());
            bytes = rest;
            self.read(range, own)?;
        }
        Ok(())
    }

    /// Waits until all chunks that were put back are stored.
    pub(crate) fn finish(&self, kernels: &Kernels) -> Result {
        kernels.finish(kernels.record(self.last_queue())?)
    }
}
