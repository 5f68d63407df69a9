//! Units of weights that come to the device from the host, or from the ranks that have their shards, and leave it
//! again.

use crate::gather::{GatheredParts, gather_bundle};
use crate::step_codes::{StepCodes, copy_of_bytes};
use crate::stream::{OnDevice, UnitsOnDevice};
use crate::{Ranks, UnitError, Zero};
use kernels::{Account, Kernels, Queue, Result};
use memory::{Arena, Category, Cover, Layout, Memory, Rank, Unit};
use std::rc::Rc;

const SHARD_CAME: &str = "a rank's shard has come before it is sent to the others";

/// The units on the device, and the order in which others come.
pub(crate) struct StreamedWeights {
    /// The units on the device. In pinned host memory are all weights, or this rank's shards.
    pub(crate) units: UnitsOnDevice,
    /// This rank, and what ranks gather of each unit: the shards that they have, before each use; or the pieces that they updated, after
    /// the update. None if this rank has and updates everything.
    pub(crate) gathers: Option<(Rank, GatheredParts)>,
    pub(crate) layout: Rc<Layout>,
    slots: usize,
    /// Whether a unit stays until the pass does not use it any more.
    is_kept: bool,
    pub(crate) order: Rc<[usize]>,
    /// How many units of the order have been used.
    pub(crate) used: usize,
    /// Whether only the elements that this rank updates are fetched.
    pub(crate) only_updated: bool,
}

impl StreamedWeights {
    pub(crate) fn new(
        memory: &Memory,
        layout: &Rc<Layout>,
        host: Option<Arena>,
        slots: usize,
        ranks: Option<&Ranks>,
    ) -> StreamedWeights {
        let gathers = |ranks: &Ranks| match ranks.zero {
            Zero::Replicated => None,
            Zero::States | Zero::Gradients => {
                (ranks.rank.of > 1).then_some((ranks.rank, GatheredParts::Pieces))
            }
            Zero::Weights => Some((ranks.rank, GatheredParts::Shards)),
        };
        StreamedWeights {
            units: UnitsOnDevice::new(memory, layout, (Category::Parameter, "unit_weights"), host),
            gathers: ranks.and_then(gathers),
            layout: layout.clone(),
            slots: slots.max(1),
            is_kept: ranks
                .is_some_and(|ranks| ranks.zero == Zero::Weights && !ranks.reshard_after_forward),
            order: Rc::new([]),
            used: 0,
            only_updated: false,
        }
    }

    /// Begins a pass that uses units in this order. With `only_updated` it is a pass of updates, for which no rank
    /// needs others' shards.
    pub(crate) fn begin_pass(&mut self, order: &Rc<[usize]>, only_updated: bool) {
        (self.order, self.used) = (order.clone(), 0);
        self.only_updated = only_updated;
    }

    /// The units that should be on the device now, the one in use first.
    pub(crate) fn wanted(&self) -> Vec<usize> {
        let rest = self.order.iter().skip(self.used.saturating_sub(1));
        let mut wanted = Vec::new();
        for unit in rest {
            if wanted.len() == self.slots {
                break;
            }
            if !wanted.contains(unit) {
                wanted.push(*unit);
            }
        }
        wanted
    }

    /// Turns to the unit that comes next in the order of the pass. Returns whether another one was in use.
    pub(crate) fn turn_to(&mut self, unit: usize) -> bool {
        if self.used > 0 && self.order[self.used - 1] == unit {
            return false;
        }
        let next = self.order.get(self.used);
        assert_eq!(next, Some(&unit), "units are used in the order of the pass");
        self.used += 1;
        true
    }

    pub(crate) fn keep_only_wanted(&mut self, kernels: &Kernels) -> Result {
        let wanted = match self.is_kept {
            true => self.order[self.used.saturating_sub(1).min(self.order.len())..].to_vec(),
            false => self.wanted(),
        };
        self.units.keep_only(kernels, &wanted)
    }
}

impl StreamedWeights {
    /// Leases room for a unit and starts fetching it.
    pub(crate) fn bring(
        &mut self,
        kernels: &Kernels,
        (resident, codes): (&Arena, Option<&StepCodes>),
        unit: usize,
    ) -> Result<(), UnitError> {
        let only_updated = self.only_updated;
        let whole = &self.layout.units()[unit];
        let own = match (self.gathers, only_updated) {
            (_, false) => whole.cover.clone(),
            (None, true) => whole.trained.clone(),
            (Some((rank, _)), true) => self.layout.piece(&whole.trained, rank),
        };
        // There is room for what others update, if they send it.
        let cover = match (self.gathers, only_updated) {
            (Some((_, GatheredParts::Pieces)), true) => whole.trained.clone(),
            _ => own.clone(),
        };
        let codes = codes.filter(|_| !only_updated);
        let codes = codes.filter(|codes| codes.has_unit(&whole.cover));
        let stored = self.units.host.as_ref().unwrap_or(resident);
        let types = codes.map_or(stored, StepCodes::arena).types().clone();
        let (here, host) = self.units.lease((unit, 0), cover, types)?;
        let source = UnitSource {
            layout: &self.layout,
            stored: host.unwrap_or(resident),
            is_on_host: host.is_some(),
            codes,
        };
        let _account = kernels.count_to(Account::Weights);
        match (self.gathers, only_updated) {
            (Some((rank, GatheredParts::Shards)), false) => {
                source.gather(kernels, here, (whole, rank))?
            }
            _ => source.fetch(kernels, here, &own)?,
        }
        Ok(())
    }
}

/// Where this rank has units from: the host, or its shards on the device.
struct UnitSource<'a> {
    layout: &'a Layout,
    /// The weights as they are stored.
    stored: &'a Arena,
    is_on_host: bool,
    /// Codes that come instead of weights.
    codes: Option<&'a StepCodes>,
}

impl<'a> UnitSource<'a> {
    /// The arenas that some elements lie in.
    fn arenas(&self, cover: &Cover) -> Vec<(&'a Arena, Cover)> {
        let Some(codes) = self.codes else {
            return vec![(self.stored, cover.clone())];
        };
        let [coded, others] = codes.split(cover);
        vec![(codes.arena(), coded), (self.stored, others)]
    }

    /// Starts fetching some elements from the host into a lease that was just taken; none if they are not there.
    fn fetch(&self, kernels: &Kernels, here: &mut OnDevice, cover: &Cover) -> Result {
        match self.is_on_host {
            true => here.fetch(kernels, &self.arenas(cover)),
            false => Ok(()),
        }
    }

    /// Starts gathering a unit from the ranks of the shard group into a lease that was just taken.
    fn gather(
        &self,
        kernels: &Kernels,
        here: &mut OnDevice,
        (unit, rank): (&Unit, Rank),
    ) -> Result {
        let shard = |bundle| self.layout.shard(bundle, rank);
        let own = Cover::joined(unit.bundles().map(shard));
        self.fetch(kernels, here, &own)?;
        match (self.is_on_host, self.codes) {
            (true, _) => kernels.wait(Queue::Collective, here.came, SHARD_CAME)?,
            (false, Some(_)) => self.copy(kernels, here, &own)?,
            (false, None) => {}
        }
        here.free(kernels, Queue::Collective)?;
        // Ranks send from the lease if the own shard was brought there, else from where it is stored.
        let is_sent_from_store = !self.is_on_host && self.codes.is_none();
        for bundle in unit.bundles() {
            let shards = (bundle, rank, GatheredParts::Shards);
            let sent = is_sent_from_store.then_some(self.stored);
            // SAFETY: the computation waits for `came` before it reads the unit, and updates write pieces only after
            // that.
            unsafe { gather_bundle(kernels, shards, sent, &mut here.arena) }?;
        }
        here.came = kernels.record(Queue::Collective)?;
        Ok(())
    }

    /// Copies some elements on the device: the ranges that ranks send may mix codes and what is stored.
    fn copy(&self, kernels: &Kernels, here: &mut OnDevice, cover: &Cover) -> Result {
        for (arena, part) in self.arenas(cover) {
            for range in part.ranges() {
                kernels.run(copy_of_bytes(here.arena.raw_mut(range), arena.raw(range)))?;
            }
        }
        Ok(())
    }
}
