//! A unit's matrices on the device, or some of their elements, and the copies from and to the host.

use kernels::{Event, Kernels, Queue, Result};
use memory::{Arena, ArenaLease, ArenaPlace, Category, Cover, DType, In, Memory, Out, OutOfMemory};
use std::ops::Range;

pub(crate) const FREE: &str = "memory is not in use when a unit comes into it";
pub(crate) const LEFT: &str = "a unit has left before its memory is used again";

/// Elements of a unit on the device, contiguous and in the layout's order: all of them, or a rank's piece.
pub(crate) struct OnDevice {
    pub(crate) unit: usize,
    pub(crate) arena: Arena,
    /// When the elements that were fetched have arrived from the host or from other ranks.
    pub(crate) came: Event,
    /// When the last copy or exchange that reads it is over.
    left: Option<Event>,
}

impl OnDevice {
    /// Leases room for some elements of a unit, in the types of another arena. The contents are unspecified.
    pub(crate) fn lease(
        memory: &Memory,
        (unit, cover): (usize, Cover),
        (category, name): (Category, &'static str),
        like: &Arena,
    ) -> Result<OnDevice, OutOfMemory> {
        let lease = ArenaLease::new(ArenaPlace::Step, category, name);
        Ok(OnDevice {
            unit,
            arena: Arena::lease(memory, lease, like.layout(), like.types().clone(), cover)?,
            came: Event::PAST,
            left: None,
        })
    }

    /// Reads a range of the layout.
    pub(crate) fn flat(&self, range: &Range<usize>) -> In<'_> {
        self.arena.flat(range.clone())
    }

    /// Writes a range of the layout.
    pub(crate) fn flat_mut(&mut self, range: &Range<usize>) -> Out<'_> {
        self.arena.flat_mut(range.clone())
    }

    /// Starts copying elements of the host's arenas into a lease that was just taken.
    pub(crate) fn fetch(&mut self, kernels: &Kernels, from: &[(&Arena, Cover)]) -> Result {
        self.free(kernels, Queue::Upload)?;
        for (host, cover) in from {
            for range in cover.ranges() {
                // SAFETY: nobody reads or writes the unit before waiting for `came`. Nobody writes the host's copy before a
                // download that waits for work which waited for `came`. Both live as long as kernels have work, or until
                // the computation has waited for this.
                unsafe { kernels.start_upload(self.arena.raw_mut(range), host.raw(range)) }?;
            }
        }
        self.came = kernels.record(Queue::Upload)?;
        Ok(())
    }

    /// Makes a queue wait until the computation so far no longer uses the memory, which was just leased.
    pub(crate) fn free(&self, kernels: &Kernels, queue: Queue) -> Result {
        kernels.wait(queue, kernels.record(Queue::Compute)?, FREE)
    }

    /// Starts copying a range of the layout to the host. The download queue must already wait for whatever wrote the
    /// range.
    pub(crate) fn send(
        &mut self,
        kernels: &Kernels,
        host: &mut Arena,
        range: &Range<usize>,
    ) -> Result {
        // SAFETY: the lease ends after the computation waits for `left` (`leave`). The host's copy is read by uploads
        // that wait for the computation after that, and by the host once the download queue is done.
        unsafe { kernels.start_download(host.raw_mut(range), self.arena.raw(range)) }?;
        self.leaves(kernels.record(Queue::Download)?);
        Ok(())
    }

    /// Notes an event after which something no longer reads the unit.
    pub(crate) fn leaves(&mut self, then: Event) {
        self.left = Some(then);
    }

    /// Whether some of it was sent, and the computation does not wait for that yet.
    pub(crate) fn has_been_sent(&self) -> bool {
        self.left.is_some()
    }

    /// Makes the computation wait for the copies that read the unit. The memory may be used again after that.
    pub(crate) fn wait_until_left(&mut self, kernels: &Kernels) -> Result {
        let left = self.left.take();
        left.map_or(Ok(()), |left| kernels.wait(Queue::Compute, left, LEFT))
    }

    /// Ends the lease. The computation must already wait for what arrives, or the host must have waited for all queues.
    pub(crate) fn leave(mut self, kernels: &Kernels) -> Result {
        self.wait_until_left(kernels)
    }
}

/// Waits for all queues of this rank that may read or write units.
pub(crate) fn finish_all(kernels: &Kernels) -> Result {
    let queues = [Queue::Update, Queue::Upload, Queue::Download];
    let finished = queues.map(|queue| kernels.finish(kernels.record(queue)?));
    finished.into_iter().collect()
}

/// The bytes of a view of host memory, once all downloads have arrived. It is called between steps.
pub(crate) fn host_bytes<'a>(kernels: &Kernels, x: In<'a>) -> Result<&'a [u8]> {
    kernels.finish(kernels.record(Queue::Download)?)?;
    Ok(x.cast(DType::U8).slice())
}
