//! Numbers that every rank has, gathered and added up in the order of the ranks.

use kernels::{Exchange, ExchangeBytes, Init, KernelError, Kernels, Queue, SumInOrder};
use memory::{Buffer, Category, DType, In, Memory, Out, OutOfMemory};
use std::ops::Range;
use units::Ranks;

const COUNTED: &str = "a rank's numbers are counted before other ranks get them";
const ALL_CAME: &str = "the numbers of all ranks have come before they are added up";

/// The sum of numbers that every rank has counted in a step.
pub(crate) struct SumOfRanks {
    ranks: usize,
    /// `[ranks n]` f32, and their sum, `[n]` f32. None if there is one rank, whose numbers are the sum.
    room: Option<[Buffer; 2]>,
}

impl SumOfRanks {
    /// Room for `n` numbers of every rank, under the name of all and that of their sum.
    pub(crate) fn lease(
        memory: &Memory,
        [all, sum]: [&'static str; 2],
        ranks: Option<&Ranks>,
        n: usize,
    ) -> Result<SumOfRanks, OutOfMemory> {
        let lease = |name, count: usize| {
            memory.lease_persistent(Category::Activation, name, [count], DType::F32)
        };
        let ranks = ranks.map_or(1, |ranks| ranks.of_all().of);
        let room = match ranks > 1 && n > 0 {
            true => Some([lease(all, ranks * n)?, lease(sum, n)?]),
            false => None,
        };
        Ok(SumOfRanks { ranks, room })
    }

    /// Adds up the numbers of all ranks, `[n]` f32, of which `own` are this rank's. Comes before the update: weights that are gathered
    /// after it would be waited for.
    pub(crate) fn add_up(&mut self, kernels: &Kernels, own: In) -> Result<(), KernelError> {
        let Some([all, sum]) = &mut self.room else {
            return Ok(());
        };
        // SAFETY: the computation waits for it below, and the numbers are written again in the next step.
        unsafe { gather(kernels, own, all.view_mut(), 0..self.ranks, COUNTED) }?;
        add_gathered(kernels, all.view(), sum.view_mut(), ALL_CAME)
    }

    /// Their sum, `[n]`: `own` where there is one rank.
    pub(crate) fn sum<'a>(&'a self, own: In<'a>) -> In<'a> {
        self.room.as_ref().map_or(own, |[_, sum]| sum.view())
    }
}

/// Every rank of `ranks`, counted among all, gives `own [n]` f32 to all of them, and gets those of all, in the order of ranks, into `all`.
/// `reason` is that for which this waits for the computation.
///
/// # Safety
/// Until a later event of [`Queue::Collective`] is over, both live and nobody else writes them or reads `all`.
pub(crate) unsafe fn gather(
    kernels: &Kernels,
    own: In,
    all: Out,
    ranks: Range<usize>,
    reason: &'static str,
) -> Result<(), KernelError> {
    kernels.wait(Queue::Collective, kernels.record(Queue::Compute)?, reason)?;
    let (count, others) = (own.elements(), ranks.len() - 1);
    let list = move || {
        let places = (0..ranks.len()).map(|place| place * count..(place + 1) * count);
        let places = all.disjoint_rows(&places.collect::<Vec<_>>());
        Exchange {
            sends: ranks.clone().map(|rank| (rank, own)).collect(),
            receives: ranks.zip(places).collect(),
        }
    };
    let bytes = ExchangeBytes::both_ways(others * own.bytes());
    // SAFETY: the caller's promise.
    unsafe { kernels.start_exchange_of_all(bytes, Box::new(list)) }
}

/// Waits for what ranks gathered, and adds it up in their order, into `out [n]` f32.
pub(crate) fn add_gathered(
    kernels: &Kernels,
    all: In,
    out: Out,
    reason: &'static str,
) -> Result<(), KernelError> {
    kernels.wait(Queue::Compute, kernels.record(Queue::Collective)?, reason)?;
    let n = out.as_in().elements();
    kernels.run(SumInOrder {
        x: all.reshape([all.elements() / n, n]),
        out,
        init: Init::Overwrite,
    })
}
