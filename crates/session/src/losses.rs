//! The loss of a step: a sum over its micro-batches, of which ranks have some each.

use kernels::{Exchange, ExchangeBytes, Init, KernelError, Kernels, Queue, SumInOrder};
use memory::{Buffer, Category, DType, In, Memory, Out, OutOfMemory};
use model::LossPart;
use std::ops::Range;
use units::{Ranks, exchange_stages};

const THERE: &str = "a micro-batch's loss is there before the others get it";
const ALL_CAME: &str = "the losses of all ranks have come before they are added up";

/// Where losses are added up, and what their gradients are multiplied by.
pub(crate) struct Losses {
    /// `[parts + 1]` f32: the parts of the step's loss ([`LossPart`]), and 1 / targets of the step, by which gradients of
    /// targets' losses are multiplied.
    sums_and_scale: Buffer,
    /// 1, or more where routers have losses of their own, or pairs have rewards.
    parts: usize,
    /// `[each parts]` f32: of the micro-batch that is being made, of each of this rank's parts of its sequences, where that is added up
    /// apart: several routers add to it, and the order of sums must not depend on the number of ranks.
    current: Option<Buffer>,
    of_ranks: Option<OfRanks>,
}

/// Losses of single micro-batches, which are added up in their order, whichever rank has them: so the sum has the same bits
/// for any number of ranks.
struct OfRanks {
    /// The ranks of this stage, among all.
    ranks: Range<usize>,
    /// `[accum each parts]` f32: of this rank.
    own: Buffer,
    /// `[accum ranks each parts]` f32.
    all: Buffer,
}

/// What the head of a micro-batch works with.
pub(crate) struct CurrentLoss<'a> {
    /// `[parts]` f32: what its losses are added to, of each of this rank's parts of its sequences.
    pub(crate) losses: Vec<Out<'a>>,
    /// Whether that is the micro-batch's own.
    pub(crate) is_alone: bool,
    /// `[1]` f32: 1 / targets of the step, or 1 / pairs.
    pub(crate) gradient_scale: In<'a>,
}

impl Losses {
    pub(crate) fn lease(
        memory: &Memory,
        ranks: Option<&Ranks>,
        accum: usize,
        parts: usize,
    ) -> Result<Losses, OutOfMemory> {
        let category = Category::OptimizerState;
        let lease =
            |name, elements| memory.lease_persistent(category, name, [elements], DType::F32);
        let is_apart = ranks.is_some() || parts == LossPart::WITH_ROUTERS;
        let each = ranks.map_or(1, |ranks| ranks.parts_each);
        let count = each * parts;
        let of_ranks = ranks.map(|ranks| {
            Ok::<_, OutOfMemory>(OfRanks {
                ranks: ranks.first_of_stage()..ranks.first_of_stage() + ranks.rank.of,
                own: lease("own_losses", accum * count)?,
                all: lease("all_losses", accum * ranks.rank.of * count)?,
            })
        });
        Ok(Losses {
            sums_and_scale: lease("loss", parts + 1)?,
            parts,
            current: is_apart
                .then(|| lease("micro_batch_loss", count))
                .transpose()?,
            of_ranks: of_ranks.transpose()?,
        })
    }

    /// A step of so many targets, or pairs, begins.
    pub(crate) fn begin_step(
        &mut self,
        kernels: &Kernels,
        counted: usize,
    ) -> Result<(), KernelError> {
        let scale = [1.0 / counted as f32];
        let (_, place) = self.sums_and_scale.view_mut().split_at(self.parts);
        kernels.upload(place, bytemuck::cast_slice(&scale))
    }

    /// What the head of the next micro-batch works with.
    pub(crate) fn current(&mut self) -> CurrentLoss<'_> {
        let (sums, scale) = self.sums_and_scale.view_mut().split_at(self.parts);
        let (losses, is_alone) = match &mut self.current {
            Some(current) => {
                let each = current.dims()[0] / self.parts;
                let rows = |part: usize| part * self.parts..(part + 1) * self.parts;
                let rows: Vec<_> = (0..each).map(rows).collect();
                (current.view_mut().disjoint_rows(&rows), true)
            }
            None => (vec![sums], false),
        };
        CurrentLoss {
            losses,
            is_alone,
            gradient_scale: scale.into_in(),
        }
    }

    /// Gives the sums, which the last stage of a pipeline has, to all other stages.
    pub(crate) fn share_over_stages(
        &mut self,
        kernels: &Kernels,
        ranks: &Ranks,
    ) -> Result<(), KernelError> {
        let (sums, _) = self.sums_and_scale.view_mut().split_at(self.parts);
        // SAFETY: the computation waits for it, and the sums live as long as kernels have work.
        unsafe { from_last_stage(kernels, ranks, sums) }
    }

    /// A micro-batch has its losses: they are added to those of the step, or the other ranks get them.
    pub(crate) fn made(
        &mut self,
        kernels: &Kernels,
        micro_batch: usize,
    ) -> Result<(), KernelError> {
        let Some(current) = &self.current else {
            return Ok(());
        };
        let losses = current.view().reshape([1, current.dims()[0]]);
        match &mut self.of_ranks {
            Some(of_ranks) => of_ranks.made(kernels, micro_batch, losses),
            None => kernels.run(SumInOrder {
                out: self.sums_and_scale.view_mut().rows(0..self.parts),
                x: losses,
                init: match micro_batch {
                    0 => Init::Overwrite,
                    _ => Init::Accumulate,
                },
            }),
        }
    }

    /// All micro-batches are made: their losses are added up.
    pub(crate) fn add_up(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        let Some(of_ranks) = &self.of_ranks else {
            return Ok(());
        };
        let came = kernels.record(Queue::Collective)?;
        kernels.wait(Queue::Compute, came, ALL_CAME)?;
        let count = of_ranks.all.dims().elements() / self.parts;
        kernels.run(SumInOrder {
            out: self.sums_and_scale.view_mut().rows(0..self.parts),
            x: of_ranks.all.view().reshape([count, self.parts]),
            init: Init::Overwrite,
        })
    }

    /// `[1]` f32: the sum of the losses of the step's targets.
    pub(crate) fn sum(&self) -> In<'_> {
        self.sums_and_scale.view().rows(0..1)
    }

    /// `[parts]` f32: all parts of the step's loss.
    pub(crate) fn all(&self) -> In<'_> {
        self.sums_and_scale.view().rows(0..self.parts)
    }
}

impl OfRanks {
    fn made(
        &mut self,
        kernels: &Kernels,
        micro_batch: usize,
        losses: In,
    ) -> Result<(), KernelError> {
        let parts = losses.elements();
        let place = micro_batch * parts..(micro_batch + 1) * parts;
        kernels.run(SumInOrder {
            out: self.own.view_mut().rows(place.clone()),
            x: losses,
            init: Init::Overwrite,
        })?;
        let there = kernels.record(Queue::Compute)?;
        kernels.wait(Queue::Collective, there, THERE)?;
        let own = self.own.view().rows(place);
        let first = micro_batch * self.ranks.len();
        let all = self.all.view_mut();
        // SAFETY: the losses are read after the computation has waited for this, and written again in the next step; they
        // live as long as kernels have work.
        unsafe { gather(kernels, own, (all, first), self.ranks.clone()) }
    }
}

/// Gives what the last stage of a pipeline has to the ranks with the same place in all others, and makes the computation wait for it.
///
/// # Safety
/// It lives until the computation has waited.
pub(crate) unsafe fn from_last_stage(
    kernels: &Kernels,
    ranks: &Ranks,
    sums: Out,
) -> Result<(), KernelError> {
    kernels.wait(Queue::Collective, kernels.record(Queue::Compute)?, THERE)?;
    let last = ranks.stage.of - 1;
    let mut bytes = vec![0; ranks.stage.of];
    bytes[last] = sums.as_in().bytes() as u64;
    // SAFETY: the caller's promise.
    unsafe { exchange_stages(kernels, ranks, &bytes, || vec![(last, sums)]) }?;
    kernels.wait(Queue::Compute, kernels.record(Queue::Collective)?, ALL_CAME)
}

/// Every rank of `ranks`, counted among all, gives `own [n]` f32 to all of them, and gets those of all, in the order of ranks, into `all` from the
/// `first`th place of `n` numbers on.
///
/// # Safety
/// Until a later event of [`Queue::Collective`] is over, both live and nobody else writes them or reads `all`.
pub(crate) unsafe fn gather(
    kernels: &Kernels,
    own: In,
    (all, first): (Out, usize),
    ranks: Range<usize>,
) -> Result<(), KernelError> {
    let count = own.elements();
    let others = ranks.len() - 1;
    let list = move || {
        let places: Vec<_> = (first..first + ranks.len())
            .map(|place| place * count..(place + 1) * count)
            .collect();
        let places = all.disjoint_rows(&places);
        Exchange {
            sends: ranks.clone().map(|rank| (rank, own)).collect(),
            receives: ranks.zip(places).collect(),
        }
    };
    let bytes = ExchangeBytes::both_ways(others * own.bytes());
    // SAFETY: the caller's promise.
    unsafe { kernels.start_exchange_of_all(bytes, Box::new(list)) }
}
