//! States that are not on the device, a chunk at a time: in pinned host memory, or in a file.

use crate::chunks::{Away, Chunks};
use crate::disk::DiskStore;
use kernels::{BlockFile, KernelError, Kernels, Queue, Result};
use memory::{Buffer, Category, DType, Home, Homes, Memory, Out, OutOfMemory};
use std::ops::Range;
use std::sync::Arc;

/// What holds the chunks of a run.
pub(crate) enum Store {
    /// All chunks, one after the other, in pinned host memory.
    Pinned(Buffer),
    /// In a file. Chunks pass through pinned host memory on their way.
    Disk(DiskStore),
}

impl Store {
    /// Leases host memory, zeroed: for all states, or for those on their way to and from a file.
    pub(crate) fn lease(
        memory: &Memory,
        chunks: &Chunks,
        homes: &Homes,
    ) -> Result<Store, OutOfMemory> {
        if let Home::Disk(_) = homes.states {
            return Ok(Store::Disk(DiskStore::lease(
                memory,
                chunks,
                homes.chunk_slots,
            )?));
        }
        let (category, dims) = (Category::OptimizerState, [chunks.away_bytes]);
        let all = memory.lease_pinned(category, "offloaded_states", dims, DType::U8)?;
        Ok(Store::Pinned(all))
    }

    /// Name and bytes of the lease.
    pub(crate) fn arena(&self) -> (&'static str, u64) {
        match self {
            Store::Pinned(all) => ("offloaded_states", all.bytes()),
            Store::Disk(disk) => ("disk_staging", disk.staging_bytes()),
        }
    }

    /// Bytes of the file; none if the states are in memory.
    pub(crate) fn disk_bytes(&self) -> Option<u64> {
        match self {
            Store::Pinned(_) => None,
            Store::Disk(disk) => Some(disk.bytes()),
        }
    }

    /// Takes a file of [`Store::disk_bytes`] zeros.
    pub(crate) fn use_file(&mut self, file: Arc<dyn BlockFile>) {
        match self {
            Store::Pinned(_) => unreachable!("states in memory need no file"),
            Store::Disk(disk) => disk.use_file(file),
        }
    }

    /// How many chunks may be on their way to the host besides those that have slots on the device.
    pub(crate) fn ahead(&self) -> usize {
        match self {
            Store::Pinned(_) => 0,
            Store::Disk(disk) => disk.ahead(),
        }
    }

    /// Starts to read a chunk into host memory. Turns count the chunks whose states live elsewhere, over all updates,
    /// and are taken in order.
    pub(crate) fn fetch(&mut self, kernels: &Kernels, turn: usize, away: &Away) -> Result {
        match self {
            Store::Pinned(_) => Ok(()),
            Store::Disk(disk) => disk.fetch(kernels, turn, &away.place),
        }
    }

    /// Makes the upload queue wait until a chunk is in host memory.
    pub(crate) fn fetched(&self, kernels: &Kernels, turn: usize) -> Result {
        match self {
            Store::Pinned(_) => Ok(()),
            Store::Disk(disk) => disk.fetched(kernels, turn),
        }
    }

    /// A chunk's bytes in host memory, during its turn.
    pub(crate) fn on_host(&mut self, turn: usize, away: &Away) -> Out<'_> {
        match self {
            Store::Pinned(all) => all.view_mut().rows(away.place.clone()),
            Store::Disk(disk) => disk.on_host(turn, &away.place),
        }
    }

    /// Ends a chunk's turn. The chunk is stored when the downloads enqueued so far are done.
    pub(crate) fn put_back(&mut self, kernels: &Kernels, turn: usize, away: &Away) -> Result {
        match self {
            Store::Pinned(_) => Ok(()),
            Store::Disk(disk) => disk.put_back(kernels, turn, &away.place),
        }
    }

    /// Ends the host's access between updates. Call it before the first turn of an update.
    pub(crate) fn end_host_access(&mut self) -> Result {
        match self {
            Store::Pinned(_) => Ok(()),
            Store::Disk(disk) => disk.end_host_access(),
        }
    }

    /// Copies ranges of the store, one after the other, between updates.
    pub(crate) fn read(
        &self,
        kernels: &Kernels,
        ranges: &[Range<usize>],
        mut bytes: &mut [u8],
    ) -> Result {
        let needed: usize = ranges.iter().map(Range::len).sum();
        if needed != bytes.len() {
            let sizes = format!(
                "the state has {needed} bytes, the host side {}",
                bytes.len()
            );
            return Err(KernelError::misfit("read", sizes));
        }
        self.finish(kernels)?;
        for range in ranges {
            let (own, rest) = bytes.split_at_mut(range.len());
            bytes = rest;
            match self {
                Store::Pinned(all) => own.copy_from_slice(all.view().rows(range.clone()).slice()),
                Store::Disk(disk) => disk.read(range, own)?,
            }
        }
        Ok(())
    }

    /// A chunk's bytes, for the host to write between updates.
    pub(crate) fn change(&mut self, kernels: &Kernels, away: &Away) -> Result<Out<'_>> {
        self.finish(kernels)?;
        match self {
            Store::Pinned(all) => Ok(all.view_mut().rows(away.place.clone())),
            Store::Disk(disk) => disk.change(&away.place),
        }
    }

    /// Waits until all chunks that were put back are stored.
    fn finish(&self, kernels: &Kernels) -> Result {
        let queue = match self {
            Store::Pinned(_) => Queue::Download,
            Store::Disk(_) => Queue::DiskWrite,
        };
        kernels.finish(kernels.record(queue)?)
    }
}
