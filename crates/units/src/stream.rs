//! A unit's matrices on the device, and its copies from and to the host.

use kernels::{Event, KernelError, Kernels, Queue};
use memory::{Arena, Buffer, Category, DType, In, Layout, Memory, Out, OutOfMemory, Unit};
use std::ops::Range;

pub(crate) const FREE: &str = "memory is not in use when a unit comes into it";
pub(crate) const LEFT: &str = "a unit has left before its memory is used again";

/// A unit's matrices on the device, one behind the other as they lie in the layout.
pub(crate) struct OnDevice {
    pub(crate) unit: usize,
    buffer: Buffer,
    /// When what the host had of it has come.
    pub(crate) came: Event,
    /// When what was sent of it has left.
    left: Option<Event>,
}

/// The unit of a layout.
pub(crate) fn unit(layout: &Layout, index: usize) -> &Unit {
    &layout.units()[index]
}

/// The unit that holds a range, and where the range lies in it.
pub(crate) fn locate(layout: &Layout, range: &Range<usize>) -> Option<(usize, Range<usize>)> {
    let mut units = layout.units().iter().enumerate();
    units.find_map(|(index, unit)| Some((index, unit.cover.rows(range)?)))
}

impl OnDevice {
    /// Leases room for a unit. Its contents are unspecified.
    pub(crate) fn lease(
        memory: &Memory,
        layout: &Layout,
        index: usize,
        (category, name): (Category, &'static str),
        dtype: DType,
    ) -> Result<OnDevice, OutOfMemory> {
        let elements = unit(layout, index).cover.elements();
        Ok(OnDevice {
            unit: index,
            buffer: memory.lease(category, name, [elements], dtype)?,
            came: Event::PAST,
            left: None,
        })
    }

    pub(crate) fn rows(&self, rows: Range<usize>) -> In<'_> {
        self.buffer.view().rows(rows)
    }

    pub(crate) fn rows_mut(&mut self, rows: Range<usize>) -> Out<'_> {
        self.buffer.view_mut().rows(rows)
    }

    /// Asks for all of the unit from the host, into a lease that was just taken.
    pub(crate) fn fetch(&mut self, kernels: &dyn Kernels, host: &Arena) -> Result<(), KernelError> {
        let leased = kernels.record(Queue::Compute)?;
        kernels.wait(Queue::Upload, leased, FREE)?;
        let cover = unit(host.layout(), self.unit).cover.clone();
        for range in cover.ranges() {
            let rows = cover.rows(range).expect("a cover holds its own ranges");
            // SAFETY: nobody reads or writes the unit before it waited for `came`, or the host's copy before a download
            // that waits for work which did; both live as long as kernels have work, or until the computation has
            // waited for this.
            unsafe { kernels.start_upload(self.rows_mut(rows), host.flat(range.clone())) }?;
        }
        self.came = kernels.record(Queue::Upload)?;
        Ok(())
    }

    /// Bytes of the unit.
    pub(crate) fn bytes(&self) -> u64 {
        (self.buffer.dims().elements() * self.buffer.dtype().size_in_bytes()) as u64
    }

    /// Asks for a range of the layout to be sent to the host, when what the download queue was told to wait for is over.
    pub(crate) fn send(
        &mut self,
        kernels: &dyn Kernels,
        host: &mut Arena,
        range: &Range<usize>,
    ) -> Result<(), KernelError> {
        let rows = unit(host.layout(), self.unit).cover.rows(range);
        let rows = rows.expect("what is sent is of the unit");
        // SAFETY: the lease ends after the computation was told to wait for `left` (`leave`), the host's copy is read by
        // uploads that wait for the computation after that, and by the host after the download queue is done.
        unsafe { kernels.start_download(host.flat_mut(range.clone()), self.rows(rows)) }?;
        self.left = Some(kernels.record(Queue::Download)?);
        Ok(())
    }

    /// Whether some of it was sent, and nobody has been told to wait for that.
    pub(crate) fn has_been_sent(&self) -> bool {
        self.left.is_some()
    }

    /// Lets the computation wait for what is being sent: the memory may be used again then.
    pub(crate) fn wait_until_left(&mut self, kernels: &dyn Kernels) -> Result<(), KernelError> {
        match self.left.take() {
            Some(left) => kernels.wait(Queue::Compute, left, LEFT),
            None => Ok(()),
        }
    }

    /// Ends the lease. The computation has waited for what came, or everything was waited for.
    pub(crate) fn leave(mut self, kernels: &dyn Kernels) -> Result<(), KernelError> {
        self.wait_until_left(kernels)
    }
}

/// Waits for everything that may read or write units.
pub(crate) fn finish_all(kernels: &dyn Kernels) -> Result<(), KernelError> {
    let queues = [Queue::Update, Queue::Upload, Queue::Download];
    let finished = queues.map(|queue| kernels.finish(kernels.record(queue)?));
    finished.into_iter().collect()
}

/// The bytes of something on the host, between steps: when all that was sent has arrived.
pub(crate) fn host_bytes<'a>(kernels: &dyn Kernels, x: In<'a>) -> Result<&'a [u8], KernelError> {
    kernels.finish(kernels.record(Queue::Download)?)?;
    Ok(x.cast(DType::U8).slice())
}
