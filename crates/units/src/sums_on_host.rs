//! Sums of gradients over ranks that live in pinned host memory. Those of a unit are on the device while the backward pass computes what is
//! added to them, and until they have been sent back.

use crate::UnitError;
use crate::grains::Grains;
use crate::stream::OnDevice;
use kernels::{Account, Event, Kernels, Queue, Result};
use memory::{Arena, Category, Memory, Rank};
use std::ops::Range;

const CAME: &str = "sums have come from the host before more is added to them";
const SUMMED: &str = "gradients are added up before their sums go to the host";

/// The sums of this rank's pieces of matrices.
pub(crate) struct SumsOnHost {
    pub(crate) host: Arena,
    rank: Rank,
    here: Vec<UnitSums>,
}

/// The sums of a unit on the device.
struct UnitSums {
    on_device: OnDevice,
    /// Whether sums made from now on wait until the host's have come.
    is_awaited: bool,
    /// Whether nothing more is added in this step.
    is_complete: bool,
}

impl SumsOnHost {
    pub(crate) fn new(host: Arena, rank: Rank) -> SumsOnHost {
        SumsOnHost {
            host,
            rank,
            here: Vec::new(),
        }
    }

    /// Leases room for the sums of a unit, and starts fetching what was added up in this step, unless they are on the device.
    pub(crate) fn open(
        &mut self,
        memory: &Memory,
        kernels: &Kernels,
        (unit, is_begun): (usize, bool),
        like: &Arena,
    ) -> Result<(), UnitError> {
        if self.here.iter().any(|here| here.on_device.unit == unit) {
            return Ok(());
        }
        let layout = self.host.layout();
        let own = layout.piece(&layout.units()[unit].trained, self.rank);
        let kind = (Category::Gradient, "unit_sums");
        // Filed even if the device failed, so that the lease outlives a copy that was started.
        self.here.push(UnitSums {
            on_device: OnDevice::lease(memory, (unit, own.clone()), kind, like)?,
            is_awaited: false,
            is_complete: false,
        });
        let here = self.here.last_mut().expect("one was pushed");
        if is_begun {
            let _account = kernels.count_to(Account::Gradients);
            here.on_device.fetch(kernels, &[(&self.host, own)])?;
        } else {
            here.on_device.free(kernels, Queue::Update)?;
        }
        Ok(())
    }

    /// A unit's sums, for [`Queue::Update`] to add to.
    pub(crate) fn add_to(&mut self, kernels: &Kernels, unit: usize) -> Result<&mut OnDevice> {
        let mut here = self.here.iter_mut();
        let here = here.find(|here| here.on_device.unit == unit);
        let here = here.expect("sums are added to while they are on the device");
        if !here.is_awaited && here.on_device.came != Event::PAST {
            kernels.wait(Queue::Update, here.on_device.came, CAME)?;
        }
        here.is_awaited = true;
        Ok(&mut here.on_device)
    }

    /// Sends a unit's sums to the host, with all that was enqueued to be added to them.
    pub(crate) fn send(&mut self, kernels: &Kernels, unit: usize, is_complete: bool) -> Result {
        let summed = kernels.record(Queue::Update)?;
        kernels.wait(Queue::Download, summed, SUMMED)?;
        let mut here = self.here.iter_mut();
        let here = here.find(|here| here.on_device.unit == unit);
        let here = here.expect("sums are sent from the device");
        here.is_complete = is_complete;
        let ranges: Vec<Range<usize>> = here.on_device.arena.held().ranges().to_vec();
        let _account = kernels.count_to(Account::Gradients);
        for range in &ranges {
            here.on_device.send(kernels, &mut self.host, range)?;
        }
        Ok(())
    }

    /// Ends the leases of all sums that were sent. The squares of complete ones are summed first.
    pub(crate) fn give_back(&mut self, kernels: &Kernels, grains: &mut Grains) -> Result {
        let has_left = |here: &UnitSums| here.on_device.has_been_sent();
        while let Some(index) = self.here.iter().position(has_left) {
            let mut here = self.here.swap_remove(index);
            here.on_device.wait_until_left(kernels)?;
            if here.is_complete {
                let own = here.on_device.arena.held().clone();
                grains.sum(kernels, &own, |range| here.on_device.flat(&range))?;
            }
        }
        Ok(())
    }

    /// Leaks what is on the device after a pass that ended early: other ranks may never send what is added to it.
    pub(crate) fn abandon(&mut self) {
        self.here.drain(..).for_each(std::mem::forget);
    }
}
