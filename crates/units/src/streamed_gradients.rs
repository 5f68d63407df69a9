//! Units of gradients on their way between host and device.

use crate::UnitError;
use crate::stream::OnDevice;
use kernels::{Account, Event, Fill, Kernels, Queue, Result};
use memory::{Arena, Category, Cover, Memory};

const CAME: &str = "a unit of gradients has come before it is added to";
const SUMMED: &str = "a unit of gradients is summed before it leaves";

/// The units of gradients on the device, and the arena on the host in which all live.
pub(crate) struct StreamedGradients {
    /// None if gradients are released, or added up over ranks.
    pub(crate) host: Option<Arena>,
    pub(crate) here: Vec<Open>,
    /// How many parts of a micro-batch have gradients of their own. With several, none live on the host.
    pub(crate) parts: usize,
}

/// A unit on the device, with the gradients of one part.
pub(crate) struct Open {
    pub(crate) on_device: OnDevice,
    part: usize,
    /// Whether the backward pass may add to it: the computation waits for what was fetched, and nothing has been sent
    /// since.
    is_open: bool,
}

impl StreamedGradients {
    fn find(&mut self, unit: usize, part: usize) -> Option<&mut Open> {
        let mut here = self.here.iter_mut();
        here.find(|open| open.on_device.unit == unit && open.part == part)
    }

    /// A unit's gradients, where the micro-batch has no parts.
    pub(crate) fn of(&self, unit: usize) -> &OnDevice {
        self.of_parts(unit)[0]
    }

    /// A unit's gradients of each part.
    pub(crate) fn of_parts(&self, unit: usize) -> Vec<&OnDevice> {
        let here = |part: usize| {
            let mut here = self.here.iter();
            let open = here.find(|open| open.on_device.unit == unit && open.part == part);
            &open
                .expect("gradients of a unit are read while it is on the device")
                .on_device
        };
        (0..self.parts).map(here).collect()
    }

    pub(crate) fn open_mut(&mut self, unit: usize, part: usize) -> &mut OnDevice {
        let open = self.find(unit, part).filter(|open| open.is_open);
        &mut open
            .expect("the backward pass contributes to units that it opened")
            .on_device
    }

    /// Leases room for a unit that has none, for each part. Starts fetching what the host has of it, or zeroes its padding.
    pub(crate) fn lease(
        &mut self,
        memory: &Memory,
        kernels: &Kernels,
        unit: usize,
        like: &Arena,
        is_begun: bool,
    ) -> Result<(), UnitError> {
        (0..self.parts)
            .try_for_each(|part| self.lease_part(memory, kernels, (unit, part), like, is_begun))
    }

    fn lease_part(
        &mut self,
        memory: &Memory,
        kernels: &Kernels,
        (unit, part): (usize, usize),
        like: &Arena,
        is_begun: bool,
    ) -> Result<(), UnitError> {
        if self.find(unit, part).is_some() {
            return Ok(());
        }
        let kind = (Category::Gradient, "unit_gradients");
        let cover = like.layout().units()[unit].trained.clone();
        let on_device = OnDevice::lease(memory, (unit, cover.clone()), kind, like)?;
        // Filed even if the device failed, so that the lease outlives a copy that was started.
        self.here.push(Open {
            on_device,
            part,
            is_open: false,
        });
        let on_device = &mut self.here.last_mut().expect("one was pushed").on_device;
        match &self.host {
            Some(host) if is_begun => {
                let _account = kernels.count_to(Account::Gradients);
                on_device.fetch(kernels, &[(host, cover)])?;
            }
            _ => clear_padding(kernels, &mut on_device.arena)?,
        }
        Ok(())
    }

    /// Opens a unit: the computation may add to it from now on. Leases room for it if it has none.
    pub(crate) fn open(
        &mut self,
        memory: &Memory,
        kernels: &Kernels,
        unit: usize,
        like: &Arena,
    ) -> Result<(), UnitError> {
        self.lease(memory, kernels, unit, like, false)?;
        for part in 0..self.parts {
            let open = self.find(unit, part).expect("it was leased");
            if !open.is_open {
                open.on_device.wait_until_left(kernels)?;
                if open.on_device.came != Event::PAST {
                    kernels.wait(Queue::Compute, open.on_device.came, CAME)?;
                }
                open.is_open = true;
            }
        }
        Ok(())
    }

    /// Sends a unit to the host, if gradients live there.
    pub(crate) fn send(&mut self, kernels: &Kernels, unit: usize) -> Result {
        let Some(host) = &mut self.host else {
            return Ok(());
        };
        let summed = kernels.record(Queue::Compute)?;
        kernels.wait(Queue::Download, summed, SUMMED)?;
        let mut here = self.here.iter_mut();
        let open = here.find(|open| open.on_device.unit == unit);
        let open = open.expect("what is closed was opened");
        open.is_open = false;
        let _account = kernels.count_to(Account::Gradients);
        for range in host.layout().clone().units()[unit].trained.ranges() {
            open.on_device.send(kernels, host, range)?;
        }
        Ok(())
    }

    /// Closes a unit whose gradients other ranks get. After the event `sent` they are no longer read.
    pub(crate) fn closed(&mut self, unit: usize, sent: Event) {
        for part in 0..self.parts {
            let open = self.find(unit, part).expect("what is closed was opened");
            open.is_open = false;
            open.on_device.leaves(sent);
        }
    }

    /// Ends the leases of all sent units except `but`.
    pub(crate) fn give_back(&mut self, kernels: &Kernels, but: Option<usize>) -> Result {
        let has_left = |open: &Open| {
            let on_device = &open.on_device;
            !open.is_open && on_device.has_been_sent() && Some(on_device.unit) != but
        };
        while let Some(index) = self.here.iter().position(has_left) {
            self.here.swap_remove(index).on_device.leave(kernels)?;
        }
        Ok(())
    }
}

/// Zeroes the padding behind a unit's tensors, because the norm and the update read it.
fn clear_padding(kernels: &Kernels, arena: &mut Arena) -> Result {
    let padding = Cover::new(arena.layout().padding()).within_all(arena.held());
    padding.ranges().iter().try_for_each(|range| {
        let out = arena.flat_mut(range.clone());
        kernels.run(Fill { out, value: 0.0 })
    })
}
