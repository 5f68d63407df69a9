//! Weights in a pass: what their users ask for, unit by unit.

use crate::gather::{GatheredParts, gather_bundle};
use crate::stream::finish_all;
use crate::{UnitError, Weights};
use kernels::{Account, Kernels, Queue, Result};
use std::ops::Range;
use std::rc::Rc;

const CAME: &str = "a unit of weights has come before it is read";
const PIECE_UPDATED: &str = "a rank's piece of a unit is updated before the others get it";
const PIECES_CAME: &str = "others' pieces of a unit have come before they go to the host";
const CAME_TO_BE_UPDATED: &str = "a unit of weights has come before it is updated";

impl Weights {
    /// Starts recording which units are used, for another session's order of units.
    pub fn keep_record(&mut self) {
        self.record = Some(Vec::new());
    }

    /// The units that were used since the record began, or since the last call, in order; none if no record is kept.
    pub fn take_record(&mut self) -> Option<Vec<usize>> {
        self.record.as_mut().map(std::mem::take)
    }

    /// Begins a pass that uses units in this order.
    pub fn begin_pass(&mut self, order: &Rc<[usize]>) {
        if let Some(streamed) = &mut self.streamed {
            streamed.begin_pass(order, false);
        }
    }

    /// Begins a pass that updates all units, in the order that it returns. Only the elements that this rank updates are fetched.
    pub fn begin_update(&mut self) -> Rc<[usize]> {
        let units = self.layout().units().iter().enumerate();
        let trained = units.filter(|(_, unit)| unit.trained.elements() > 0);
        let order: Rc<[usize]> = trained.map(|(index, _)| index).collect();
        if let Some(streamed) = &mut self.streamed {
            streamed.begin_pass(&order, true);
        }
        order
    }

    /// Makes `queue` wait until the elements of a unit that are to be updated have arrived.
    ///
    /// # Errors
    /// `KernelError` if the device fails.
    pub fn ready(&self, kernels: &Kernels, queue: Queue, unit: usize) -> Result {
        match self.streamed.as_ref().filter(|_| self.is_on_host()) {
            Some(streamed) => kernels.wait(
                queue,
                streamed.units.get((unit, 0)).came,
                CAME_TO_BE_UPDATED,
            ),
            None => Ok(()),
        }
    }

    /// Sends a range that was updated on the device back to the host. The download queue must already wait for the
    /// update.
    ///
    /// # Errors
    /// `KernelError` if the device fails.
    pub fn updated(&mut self, kernels: &Kernels, range: &Range<usize>) -> Result {
        let unit = self.comes_with(range);
        match (&mut self.streamed, unit) {
            (Some(streamed), Some(unit)) => streamed.units.send_range(kernels, (unit, 0), range),
            _ => Ok(()),
        }
    }

    /// Makes a unit the one that the computation uses from now on. It is fetched now if it was not fetched ahead.
    /// Returns whether another unit was in use before.
    ///
    /// # Errors
    /// [`UnitError`] if a lease is refused or the device fails.
    ///
    /// # Panics
    /// If another unit comes next in the order of the pass.
    pub fn use_unit(&mut self, kernels: &Kernels, unit: usize) -> Result<bool, UnitError> {
        if let Some(record) = &mut self.record
            && record.last() != Some(&unit)
        {
            record.push(unit);
        }
        if let Some(gathered) = &mut self.gathered {
            gathered.used(kernels, unit)?;
        }
        let Some(streamed) = self.streamed.as_mut() else {
            return Ok(false);
        };
        if !streamed.turn_to(unit) {
            return Ok(false);
        }
        if !streamed.units.has((unit, 0)) {
            streamed.keep_only_wanted(kernels)?;
        }
        self.bring(kernels, &[unit])?;
        let streamed = self.streamed.as_ref().expect("the unit came to it");
        kernels.wait(Queue::Compute, streamed.units.get((unit, 0)).came, CAME)?;
        Ok(true)
    }

    /// Drops units that are not used soon, and starts fetching the next ones, as far as there are slots.
    ///
    /// # Errors
    /// As [`Weights::use_unit`].
    pub fn look_ahead(&mut self, kernels: &Kernels) -> Result<(), UnitError> {
        let Some(streamed) = &mut self.streamed else {
            return Ok(());
        };
        streamed.keep_only_wanted(kernels)?;
        let wanted = streamed.wanted();
        self.bring(kernels, &wanted)
    }

    /// Gathers what other ranks updated of a unit that came to be updated, and sends it to the host, if every rank has all weights
    /// there. This rank's updates of it must have been asked for.
    ///
    /// # Errors
    /// `KernelError` if the device or another rank fails.
    pub fn gather_updated_unit(&mut self, kernels: &Kernels, unit: usize) -> Result {
        let Some(streamed) = &mut self.streamed else {
            return Ok(());
        };
        let (Some((rank, what @ GatheredParts::Pieces)), Some(_)) =
            (streamed.gathers, &streamed.units.host)
        else {
            return Ok(());
        };
        // Whole tensors are updated in the queue of the computation, which also waited until the lease's memory was free.
        for queue in [Queue::Compute, Queue::Update] {
            kernels.wait(Queue::Collective, kernels.record(queue)?, PIECE_UPDATED)?;
        }
        let bundle = &streamed.layout.units()[unit].trained;
        let here = streamed.units.get_mut((unit, 0));
        let _account = kernels.count_to(Account::Weights);
        // SAFETY: the download queue waits for the gathering, and the lease ends after what that queue does then (`wait_until_left`), or never
        // (`abandon`). The own piece is only read until then.
        unsafe { gather_bundle(kernels, (bundle, rank, what), None, &mut here.arena) }?;
        kernels.wait(
            Queue::Download,
            kernels.record(Queue::Collective)?,
            PIECES_CAME,
        )?;
        let others = bundle.without(&streamed.layout.piece(bundle, rank));
        for range in others.ranges() {
            streamed.units.send_range(kernels, (unit, 0), range)?;
        }
        // Also where the others had nothing.
        streamed.units.get_mut((unit, 0)).left = Some(kernels.record(Queue::Download)?);
        Ok(())
    }

    /// Ends a pass and drops all its units, so that each pass begins with the same leases and needs the same memory.
    ///
    /// # Errors
    /// `KernelError` if the device fails.
    pub fn end_pass(&mut self, kernels: &Kernels) -> Result {
        let Some(streamed) = &mut self.streamed else {
            return Ok(());
        };
        (streamed.order, streamed.used) = (Rc::new([]), 0);
        streamed.keep_only_wanted(kernels)
    }

    /// Drops everything after a pass that ended early. The host waits for all queues, since copies may be under way. It waits for
    /// other ranks only where an update or a copy to the host waits for what they send, and then no longer than an exchange may take.
    ///
    /// # Errors
    /// `KernelError` if the device fails. Nothing is left on the device then either.
    pub fn abandon(&mut self, kernels: &Kernels) -> Result {
        match &mut self.streamed {
            Some(streamed) if !streamed.units.is_empty() => {
                let finished = finish_all(kernels);
                streamed.units.abandon(streamed.gathers.is_some());
                finished
            }
            _ => Ok(()),
        }
    }

    /// Leases room for the units that are not on the device, and starts fetching them.
    fn bring(&mut self, kernels: &Kernels, wanted: &[usize]) -> Result<(), UnitError> {
        let Weights {
            resident,
            streamed: Some(streamed),
            gathered,
            step_codes,
            ..
        } = self
        else {
            return Ok(());
        };
        for unit in wanted {
            if streamed.units.has((*unit, 0)) {
                continue;
            }
            if let Some(gathered) = gathered.as_mut().filter(|_| !streamed.only_updated) {
                gathered.bring_shard(kernels, resident, *unit)?;
            }
            streamed.bring(kernels, (resident, step_codes.as_ref()), *unit)?;
        }
        Ok(())
    }
}
