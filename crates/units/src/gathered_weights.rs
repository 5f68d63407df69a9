//! Weights of which other ranks update parts that this rank keeps. Each rank sends them what it updated, after the update.

use crate::gather::{GatheredParts, gather_bundle};
use kernels::{Account, Event, Kernels, Queue, Result};
use memory::{Arena, Cover, Rank};

const UPDATED: &str = "a rank's pieces are updated before they are sent to the others";
const GATHERED: &str = "the pieces of all ranks have come before they are read";

/// What an arena keeps of the trained bundles, and when other ranks' updates of it have come.
pub(crate) struct GatheredWeights {
    rank: Rank,
    /// Whether bundles are gathered beside the computation, which then waits for each when it is used.
    is_overlapped: bool,
    /// By the number of the bundle.
    bundles: Vec<GatheredBundle>,
}

/// What an arena keeps of a bundle, as far as other ranks update it.
struct GatheredBundle {
    bundle: Cover,
    /// All of it, or this rank's shard; none if this rank updates all that it keeps.
    what: Option<GatheredParts>,
    /// Whether others' updates have yet to be gathered.
    is_owed: bool,
    came: Option<Event>,
}

impl GatheredWeights {
    /// The bundles of an arena's layout.
    pub(crate) fn of(arena: &Arena, rank: Rank, is_overlapped: bool) -> GatheredWeights {
        let layout = arena.layout();
        let keeps =
            |cover: &Cover| cover.elements() > 0 && arena.held().within_all(cover) == *cover;
        let kept = |bundle: Cover| {
            let shard = layout.shard(&bundle, rank);
            let is_shared = layout.ranks_of_shard(rank).count() > 1;
            let what = match keeps(&bundle) {
                true => Some(GatheredParts::Pieces),
                false => (is_shared && keeps(&shard)).then_some(GatheredParts::OwnShard),
            };
            GatheredBundle {
                bundle,
                what,
                is_owed: false,
                came: None,
            }
        };
        GatheredWeights {
            rank,
            is_overlapped,
            bundles: layout.bundles().into_iter().map(kept).collect(),
        }
    }

    /// Starts gathering all bundles that are kept whole, the vectors first, then the units in the order of their use. Shards come
    /// when their units do ([`GatheredWeights::bring_shard`]): they may cross a slow link, and all exchanges go in one order.
    pub(crate) fn start(&mut self, kernels: &Kernels, arena: &mut Arena) -> Result {
        kernels.wait(Queue::Collective, kernels.record(Queue::Compute)?, UPDATED)?;
        for kept in &mut self.bundles {
            kept.is_owed = kept.what.is_some();
        }
        let vectors = self.bundles.len() - 1;
        for index in [vectors].into_iter().chain(0..vectors) {
            if let Some(GatheredParts::Pieces) = self.bundles[index].what {
                self.gather(kernels, arena, index)?;
            }
        }
        match self.is_overlapped {
            true => Ok(()),
            false => self.wait_until_gathered(kernels, arena),
        }
    }

    /// Starts gathering what others updated of this rank's shard of a unit, unless that was done since.
    pub(crate) fn bring_shard(
        &mut self,
        kernels: &Kernels,
        arena: &mut Arena,
        unit: usize,
    ) -> Result {
        let _account = kernels.count_to_step_before(Account::Weights);
        self.gather(kernels, arena, unit)
    }

    /// Starts gathering a bundle, if others' updates of it are owed.
    fn gather(&mut self, kernels: &Kernels, arena: &mut Arena, index: usize) -> Result {
        let kept = &mut self.bundles[index];
        let Some(what) = kept.what.filter(|_| std::mem::take(&mut kept.is_owed)) else {
            return Ok(());
        };
        let _account = kernels.count_to(Account::Weights);
        // SAFETY: the computation waits for `came` before it reads or writes the bundle, and the arena lives as long as kernels have
        // work. Ranks read each other's shards in later exchanges, and these go in order.
        unsafe { gather_bundle(kernels, (&kept.bundle, self.rank, what), None, arena) }?;
        kept.came = Some(kernels.record(Queue::Collective)?);
        Ok(())
    }

    /// Whether others' updates have yet to be gathered.
    pub(crate) fn is_owed(&self) -> bool {
        self.bundles.iter().any(|kept| kept.is_owed)
    }

    /// Makes the computation wait for a unit and for the vectors.
    pub(crate) fn used(&mut self, kernels: &Kernels, unit: usize) -> Result {
        let vectors = self.bundles.len() - 1;
        for index in [vectors, unit] {
            if let Some(came) = self.bundles[index].came.take() {
                kernels.wait(Queue::Compute, came, GATHERED)?;
            }
        }
        Ok(())
    }

    /// Gathers all that is owed, and makes the computation wait for it.
    pub(crate) fn wait_until_gathered(&mut self, kernels: &Kernels, arena: &mut Arena) -> Result {
        for index in 0..self.bundles.len() {
            self.gather(kernels, arena, index)?;
        }
        let mut came = self.bundles.iter_mut().filter_map(|kept| kept.came.take());
        came.try_for_each(|came| kernels.wait(Queue::Compute, came, GATHERED))
    }
}
