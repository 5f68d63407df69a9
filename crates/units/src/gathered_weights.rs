//! Weights that every rank holds whole. Each rank updates its pieces, and sends them to the others after the update.

use crate::gather::gather_bundle;
use kernels::{Event, KernelError, Kernels, Queue, Traffic};
use memory::{Arena, Cover, Rank};

const UPDATED: &str = "a rank's pieces are updated before they are sent to the others";
const GATHERED: &str = "the pieces of all ranks have come before they are read";

/// The bundles of an arena that are gathered after an update, and the event at which each is complete.
pub(crate) struct GatheredWeights {
    rank: Rank,
    /// Whether bundles are gathered beside the computation, which then waits for each when it is used.
    is_overlapped: bool,
    /// By the number of the bundle. Bundles that are not gathered are empty.
    bundles: Vec<Cover>,
    came: Vec<Option<Event>>,
    pub(crate) traffic: Traffic,
}

impl GatheredWeights {
    /// The bundles of an arena's layout that it holds as a whole.
    pub(crate) fn of(arena: &Arena, rank: Rank, is_overlapped: bool) -> GatheredWeights {
        let is_held = |bundle: &Cover| bundle.within_all(arena.held()) == *bundle;
        let bundles = arena.layout().bundles().into_iter();
        let held = |bundle: Cover| match is_held(&bundle) {
            true => bundle,
            false => Cover::new([]),
        };
        let bundles: Vec<Cover> = bundles.map(held).collect();
        GatheredWeights {
            rank,
            is_overlapped,
            came: vec![None; bundles.len()],
            bundles,
            traffic: Traffic::default(),
        }
    }

    /// Starts gathering all bundles, the vectors first, then the units in the order of their use.
    pub(crate) fn start(
        &mut self,
        kernels: &Kernels,
        arena: &mut Arena,
    ) -> Result<(), KernelError> {
        kernels.wait(Queue::Collective, kernels.record(Queue::Compute)?, UPDATED)?;
        let vectors = self.bundles.len() - 1;
        for index in [vectors].into_iter().chain(0..vectors) {
            let bundle = &self.bundles[index];
            if bundle.elements() == 0 {
                continue;
            }
            let types = arena.types().clone();
            // SAFETY: the computation waits for `came` before it reads or writes the bundle, and the arena lives as
            // long as kernels have work.
            let sent = unsafe {
                gather_bundle(kernels, self.rank, (bundle, &types), None, |ranges| {
                    arena.disjoint_raw_mut(ranges)
                })
            }?;
            self.traffic = self.traffic.plus(sent);
            self.came[index] = Some(kernels.record(Queue::Collective)?);
        }
        match self.is_overlapped {
            true => Ok(()),
            false => self.wait_until_gathered(kernels),
        }
    }

    /// Makes the computation wait for a unit and for the vectors.
    pub(crate) fn used(&mut self, kernels: &Kernels, unit: usize) -> Result<(), KernelError> {
        let vectors = self.came.len() - 1;
        for index in [vectors, unit] {
            if let Some(came) = self.came[index].take() {
                kernels.wait(Queue::Compute, came, GATHERED)?;
            }
        }
        Ok(())
    }

    /// Makes the computation wait for all bundles.
    pub(crate) fn wait_until_gathered(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        let mut came = self.came.iter_mut().filter_map(Option::take);
        came.try_for_each(|came| kernels.wait(Queue::Compute, came, GATHERED))
    }
}
