//! Numbers that every rank has counted in a step, added up in the order of the ranks.

use crate::losses::gather;
use kernels::{Init, KernelError, Kernels, Queue, SumInOrder};
use memory::{Buffer, Category, DType, In, Memory, OutOfMemory};
use units::Ranks;

const COUNTED: &str = "a rank's numbers are counted before other ranks get them";
const ALL_CAME: &str = "the numbers of all ranks have come before they are added up";

/// Room for numbers of other ranks.
pub(crate) struct SumOfRanks {
    ranks: usize,
    /// `[ranks n]` f32.
    all: Buffer,
    /// `[n]` f32.
    sum: Buffer,
}

impl SumOfRanks {
    /// Room for `n` numbers of every rank, under the name of all and that of their sum; none if there is one rank.
    ///
    /// # Errors
    /// [`OutOfMemory`] if it is refused.
    pub(crate) fn lease(
        memory: &Memory,
        [all, sum]: [&'static str; 2],
        ranks: Option<&Ranks>,
        n: usize,
    ) -> Result<Option<SumOfRanks>, OutOfMemory> {
        let lease = |name, count: usize| {
            memory.lease_persistent(Category::Activation, name, [count], DType::F32)
        };
        let ranks = ranks.map(|ranks| ranks.of_all().of);
        let Some(ranks) = ranks.filter(|ranks| *ranks > 1) else {
            return Ok(None);
        };
        Ok(Some(SumOfRanks {
            ranks,
            all: lease(all, ranks * n)?,
            sum: lease(sum, n)?,
        }))
    }

    /// Adds up the numbers of all ranks, `[n]` f32, of which `own` are this rank's.
    ///
    /// # Errors
    /// [`KernelError`] if the device or another rank fails.
    pub(crate) fn add_up(&mut self, kernels: &Kernels, own: In) -> Result<(), KernelError> {
        let counted = kernels.record(Queue::Compute)?;
        kernels.wait(Queue::Collective, counted, COUNTED)?;
        // SAFETY: the computation waits for it below, and the numbers are written again in the next step.
        unsafe { gather(kernels, own, (self.all.view_mut(), 0), 0..self.ranks)? };
        let came = kernels.record(Queue::Collective)?;
        kernels.wait(Queue::Compute, came, ALL_CAME)?;
        let all = self.all.view();
        kernels.run(SumInOrder {
            out: self.sum.view_mut(),
            x: all.reshape([self.ranks, all.elements() / self.ranks]),
            init: Init::Overwrite,
        })
    }

    /// Their sum, `[n]`.
    pub(crate) fn sum(&self) -> In<'_> {
        self.sum.view()
    }
}
