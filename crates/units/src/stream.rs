//! Units on the device of what lives elsewhere: weights, gradients, or sums of these over ranks. Each kind goes the same way: a unit is
//! leased, what the host has of it is fetched, it is used, sent back if it changed, and leaves.

use kernels::{Account, Event, Kernels, Queue, Result};
use memory::{
    Arena, ArenaLease, ArenaPlace, Category, Cover, DType, In, Layout, Memory, Out, OutOfMemory,
    Types,
};
use std::ops::Range;
use std::rc::Rc;

const ON_DEVICE: &str = "a unit is used while it is on the device";
pub(crate) const FREE: &str = "memory is not in use when a unit comes into it";
pub(crate) const LEFT: &str = "a unit has left before its memory is used again";

/// The units of one kind on the device, and the arena in pinned host memory in which all of the kind live, if they do.
pub(crate) struct UnitsOnDevice {
    memory: Memory,
    layout: Rc<Layout>,
    lease: ArenaLease,
    account: Account,
    pub(crate) host: Option<Arena>,
    here: Vec<OnDevice>,
}

/// A unit; where a rank has several parts of each sequence, what one of them adds to it.
pub(crate) type UnitOfPart = (usize, usize);

/// Elements of a unit on the device, contiguous and in the layout's order: all of them, or a rank's piece.
pub(crate) struct OnDevice {
    of: UnitOfPart,
    pub(crate) arena: Arena,
    /// To which its copies are counted.
    account: Account,
    /// When the elements that were fetched have arrived from the host or from other ranks.
    pub(crate) came: Event,
    /// When the last copy or exchange that reads it is over.
    pub(crate) left: Option<Event>,
    /// Whether it may be added to: the queue that does so waits for what was fetched, and nothing has been sent since.
    is_open: bool,
    /// Whether nothing more is added in this step. Only sums over ranks are asked.
    pub(crate) is_complete: bool,
}

impl UnitsOnDevice {
    /// No unit yet. Leases will have this category and name.
    pub(crate) fn new(
        memory: &Memory,
        layout: &Rc<Layout>,
        (category, name): (Category, &'static str),
        host: Option<Arena>,
    ) -> UnitsOnDevice {
        UnitsOnDevice {
            memory: memory.clone(),
            layout: layout.clone(),
            lease: ArenaLease::new(ArenaPlace::Step, category, name),
            account: match category {
                Category::Parameter => Account::Weights,
                _ => Account::Gradients,
            },
            host,
            here: Vec::new(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.here.is_empty()
    }

    fn place(&self, of: UnitOfPart) -> Option<usize> {
        self.here.iter().position(|here| here.of == of)
    }

    pub(crate) fn has(&self, of: UnitOfPart) -> bool {
        self.place(of).is_some()
    }

    pub(crate) fn get(&self, of: UnitOfPart) -> &OnDevice {
        &self.here[self.place(of).expect(ON_DEVICE)]
    }

    pub(crate) fn get_mut(&mut self, of: UnitOfPart) -> &mut OnDevice {
        let place = self.place(of).expect(ON_DEVICE);
        &mut self.here[place]
    }

    /// A unit that may be added to.
    pub(crate) fn get_open(&mut self, of: UnitOfPart) -> &mut OnDevice {
        let here = self.get_mut(of);
        assert!(here.is_open, "what is added to was opened");
        here
    }

    /// Leases room for some elements of a unit. The contents are unspecified. Also returns the arena on the host. The unit stays on the list
    /// even if the device fails then, so that the lease outlives a copy that was started.
    pub(crate) fn lease(
        &mut self,
        of: UnitOfPart,
        cover: Cover,
        types: Types,
    ) -> Result<(&mut OnDevice, Option<&Arena>), OutOfMemory> {
        self.here.push(OnDevice {
            of,
            arena: Arena::lease(&self.memory, self.lease, &self.layout, types, cover)?,
            account: self.account,
            came: Event::PAST,
            left: None,
            is_open: false,
            is_complete: false,
        });
        let here = self.here.last_mut().expect("one was pushed");
        Ok((here, self.host.as_ref()))
    }

    /// Lets `queue` add to a unit, once what was fetched has come, and what was sent has left.
    pub(crate) fn open(
        &mut self,
        kernels: &Kernels,
        queue: Queue,
        of: UnitOfPart,
        came: &'static str,
    ) -> Result<&mut OnDevice> {
        let here = self.get_mut(of);
        if !here.is_open {
            here.wait_until_left(kernels)?;
            if here.came != Event::PAST {
                kernels.wait(queue, here.came, came)?;
            }
            here.is_open = true;
        }
        Ok(here)
    }

    /// Sends a unit that was added to in `queue` to the host, and closes it.
    pub(crate) fn send(
        &mut self,
        kernels: &Kernels,
        queue: Queue,
        of: UnitOfPart,
        added: &'static str,
    ) -> Result {
        kernels.wait(Queue::Download, kernels.record(queue)?, added)?;
        let here = self.get_mut(of);
        here.is_open = false;
        let ranges: Vec<Range<usize>> = here.arena.held().ranges().to_vec();
        ranges
            .iter()
            .try_for_each(|range| self.send_range(kernels, of, range))
    }

    /// Starts copying a range of the layout to the host, if it lives there. The download queue must already wait for whatever wrote the
    /// range.
    pub(crate) fn send_range(
        &mut self,
        kernels: &Kernels,
        of: UnitOfPart,
        range: &Range<usize>,
    ) -> Result {
        let _account = kernels.count_to(self.account);
        let place = self.place(of).expect(ON_DEVICE);
        let (Some(host), here) = (&mut self.host, &mut self.here[place]) else {
            return Ok(());
        };
        // SAFETY: the lease ends after the computation waits for `left` (`wait_until_left`). The host's copy is read by uploads
        // that wait for the computation after that, and by the host once the download queue is done.
        unsafe { kernels.start_download(host.raw_mut(range), here.arena.raw(range)) }?;
        here.left = Some(kernels.record(Queue::Download)?);
        Ok(())
    }

    /// Removes one closed and sent unit from the list, never `but`. The computation waits until it has left, so its memory may be used again
    /// once it is dropped.
    pub(crate) fn take_sent(
        &mut self,
        kernels: &Kernels,
        but: Option<usize>,
    ) -> Result<Option<OnDevice>> {
        let is_sent =
            |here: &OnDevice| !here.is_open && here.left.is_some() && Some(here.of.0) != but;
        self.take(kernels, is_sent)
    }

    /// Ends the leases of all units but these. The computation must already wait for what arrives.
    pub(crate) fn keep_only(&mut self, kernels: &Kernels, kept: &[usize]) -> Result {
        let is_over = |here: &OnDevice| !kept.contains(&here.of.0);
        while self.take(kernels, is_over)?.is_some() {}
        Ok(())
    }

    fn take(
        &mut self,
        kernels: &Kernels,
        is_over: impl Fn(&OnDevice) -> bool,
    ) -> Result<Option<OnDevice>> {
        let Some(index) = self.here.iter().position(is_over) else {
            return Ok(None);
        };
        let mut taken = self.here.swap_remove(index);
        taken.wait_until_left(kernels)?;
        Ok(Some(taken))
    }

    /// Ends the leases of some units. The computation must already wait for whatever uses them.
    pub(crate) fn release(&mut self, is_over: impl Fn(usize) -> bool) {
        self.here.retain(|here| !is_over(here.of.0));
    }

    /// Drops all units after a pass that ended early, whose copies the host has waited for. Those that other ranks use are leaked: ranks may
    /// never take what they are sent, nor send what was asked for, so nobody waits for them, and the memory is not used again.
    pub(crate) fn abandon(&mut self, other_ranks_use_them: bool) {
        match other_ranks_use_them {
            true => self.here.drain(..).for_each(std::mem::forget),
            false => self.here.clear(),
        }
    }
}

impl OnDevice {
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
        let _account = kernels.count_to(self.account);
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

    /// Closes a unit that other ranks get. After the event `sent` it is no longer read.
    pub(crate) fn close(&mut self, sent: Event) {
        self.is_open = false;
        self.left = Some(sent);
    }

    /// Makes the computation wait for the copies that read the unit. The memory may be used again after that.
    fn wait_until_left(&mut self, kernels: &Kernels) -> Result {
        let left = self.left.take();
        left.map_or(Ok(()), |left| kernels.wait(Queue::Compute, left, LEFT))
    }
}

/// Waits for all queues of this rank that may read or write units.
pub(crate) fn finish_all(kernels: &Kernels) -> Result {
    let queues = [Queue::Update, Queue::Upload, Queue::Download];
    let finished = queues.map(|queue| kernels.finish(kernels.record(queue)?));
    finished.into_iter().collect()
}

/// Copies a view of host memory, once all downloads have arrived. It is called between steps.
pub(crate) fn read_host(kernels: &Kernels, bytes: &mut [u8], x: In) -> Result {
    kernels.finish(kernels.record(Queue::Download)?)?;
    bytes.copy_from_slice(x.cast(DType::U8).slice());
    Ok(())
}
