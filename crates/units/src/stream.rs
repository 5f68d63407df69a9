//! A unit's matrices on the device, or some of their elements, and their copies from and to the host.

use kernels::{Event, KernelError, Kernels, Queue};
use memory::{Arena, ArenaLease, ArenaPlace, Category, Cover, DType, In, Memory, Out, OutOfMemory};
use std::ops::Range;

pub(crate) const FREE: &str = "memory is not in use when a unit comes into it";
pub(crate) const LEFT: &str = "a unit has left before its memory is used again";

/// Elements of a unit on the device, one behind the other as they lie in the layout: all, or a rank's piece.
pub(crate) struct OnDevice {
    pub(crate) unit: usize,
    pub(crate) arena: Arena,
    /// When what the host, or other ranks, had of it has come.
    pub(crate) came: Event,
    /// When what was sent of it has left.
    left: Option<Event>,
}

impl OnDevice {
    /// Leases room for some elements of a unit, in the types of another arena. Its contents are unspecified.
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

    /// Asks for what the host has of it, in a lease that was just taken.
    pub(crate) fn fetch(
        &mut self,
        kernels: &Kernels,
        host: &Arena,
        cover: &Cover,
    ) -> Result<(), KernelError> {
        self.free(kernels, Queue::Upload)?;
        for range in cover.ranges() {
            // SAFETY: nobody reads or writes the unit before it waited for `came`, or the host's copy before a download
            // that waits for work which did; both live as long as kernels have work, or until the computation has
            // waited for this.
            unsafe { kernels.start_upload(self.arena.raw_mut(range), host.raw(range)) }?;
        }
        self.came = kernels.record(Queue::Upload)?;
        Ok(())
    }

    /// Lets a queue wait until the memory, which was just leased, is not in use any more.
    pub(crate) fn free(&self, kernels: &Kernels, queue: Queue) -> Result<(), KernelError> {
        kernels.wait(queue, kernels.record(Queue::Compute)?, FREE)
    }

    /// Bytes of what is here.
    pub(crate) fn bytes(&self) -> u64 {
        self.arena.types().bytes(self.arena.held()) as u64
    }

    /// Asks for a range of the layout to be sent to the host, when what the download queue was told to wait for is over.
    pub(crate) fn send(
        &mut self,
        kernels: &Kernels,
        host: &mut Arena,
        range: &Range<usize>,
    ) -> Result<(), KernelError> {
        // SAFETY: the lease ends after the computation was told to wait for `left` (`leave`), the host's copy is read by
        // uploads that wait for the computation after that, and by the host after the download queue is done.
        unsafe { kernels.start_download(host.raw_mut(range), self.arena.raw(range)) }?;
        self.leaves(kernels.record(Queue::Download)?);
        Ok(())
    }

    /// Something that reads it will be over then.
    pub(crate) fn leaves(&mut self, then: Event) {
        self.left = Some(then);
    }

    /// Whether some of it was sent, and nobody has been told to wait for that.
    pub(crate) fn has_been_sent(&self) -> bool {
        self.left.is_some()
    }

    /// Lets the computation wait for what is being sent: the memory may be used again then.
    pub(crate) fn wait_until_left(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        match self.left.take() {
            Some(left) => kernels.wait(Queue::Compute, left, LEFT),
            None => Ok(()),
        }
    }

    /// Ends the lease. The computation has waited for what came, or everything was waited for.
    pub(crate) fn leave(mut self, kernels: &Kernels) -> Result<(), KernelError> {
        self.wait_until_left(kernels)
    }
}

/// Waits for everything on this side of the links that may read or write units.
pub(crate) fn finish_all(kernels: &Kernels) -> Result<(), KernelError> {
    let queues = [Queue::Update, Queue::Upload, Queue::Download];
    let finished = queues.map(|queue| kernels.finish(kernels.record(queue)?));
    finished.into_iter().collect()
}

/// The bytes of something on the host, between steps: when all that was sent has arrived.
pub(crate) fn host_bytes<'a>(kernels: &Kernels, x: In<'a>) -> Result<&'a [u8], KernelError> {
    kernels.finish(kernels.record(Queue::Download)?)?;
    Ok(x.cast(DType::U8).slice())
}
