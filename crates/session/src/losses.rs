//! The loss of a step: a sum over its micro-batches, of which ranks have some each.

use crate::sum_of_ranks::{add_gathered, gather};
use kernels::{Init, KernelError, Kernels, Queue, SumInOrder};
use memory::{Buffer, Category, DType, In, Memory, Out, OutOfMemory};
use model::{HeadLoss, LossPart, StepLoss};
use std::ops::Range;
use units::{Ranks, exchange_stages};

const THERE: &str = "a micro-batch's loss is there before the others get it";
const ALL_CAME: &str = "the losses of all ranks have come before they are added up";

/// Where losses are added up, and what their gradients are multiplied by.
pub(crate) struct Losses {
    /// `[parts + 1]` f32: the parts of the step's loss ([`LossPart`]), and what gradients are multiplied by
    /// ([`StepLoss::gradient_scale`]).
    sums_and_scale: Buffer,
    /// 1, or more where routers have losses of their own, pairs have rewards, or a policy is learnt.
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

    /// A step begins that counts so many targets, or pairs; 1 for a policy, whose targets have weights.
    pub(crate) fn begin_step(
        &mut self,
        kernels: &Kernels,
        counted: usize,
    ) -> Result<(), KernelError> {
        let scale = [1.0 / counted as f32];
        let (_, place) = self.sums_and_scale.view_mut().split_at(self.parts);
        kernels.upload(place, bytemuck::cast_slice(&scale))
    }

    /// Gives the head of the next micro-batch its places for losses, one for each of this rank's parts of its sequences. The step has so
    /// many micro-batches.
    pub(crate) fn of_micro_batch<'a>(
        &'a mut self,
        is_first: bool,
        (micro_batches, of_head): (usize, HeadLoss<'a>),
    ) -> Vec<StepLoss<'a>> {
        let (sums, scale) = self.sums_and_scale.view_mut().split_at(self.parts);
        let gradient_scale = scale.into_in();
        let are_first = [is_first || self.current.is_some(); LossPart::MOST];
        let places = match &mut self.current {
            Some(current) => {
                let each = current.dims()[0] / self.parts;
                let rows = |part: usize| part * self.parts..(part + 1) * self.parts;
                let rows: Vec<_> = (0..each).map(rows).collect();
                current.view_mut().disjoint_rows(&rows)
            }
            None => vec![sums],
        };
        let losses = places.into_iter().map(|sums| StepLoss {
            sums,
            are_first,
            micro_batches,
            gradient_scale,
            of_head,
        });
        losses.collect()
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
        let count = current.dims()[0];
        let place = micro_batch * count..(micro_batch + 1) * count;
        let init = match self.of_ranks.is_none() && micro_batch > 0 {
            true => Init::Accumulate,
            false => Init::Overwrite,
        };
        let out = match &mut self.of_ranks {
            Some(of_ranks) => of_ranks.own.view_mut().rows(place.clone()),
            None => self.sums_and_scale.view_mut().rows(0..self.parts),
        };
        let x = current.view().reshape([1, count]);
        kernels.run(SumInOrder { out, x, init })?;
        let Some(of_ranks) = &mut self.of_ranks else {
            return Ok(());
        };
        let (ranks, own) = (of_ranks.ranks.clone(), of_ranks.own.view());
        let places = place.start * ranks.len()..place.end * ranks.len();
        let all = of_ranks.all.view_mut().rows(places);
        // SAFETY: the losses are read after the computation has waited for this, and written again in the next step; they
        // live as long as kernels have work.
        unsafe { gather(kernels, own.rows(place), all, ranks, THERE) }
    }

    /// All micro-batches are made: their losses are added up.
    pub(crate) fn add_up(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        let Some(of_ranks) = &self.of_ranks else {
            return Ok(());
        };
        let sums = self.sums_and_scale.view_mut().rows(0..self.parts);
        add_gathered(kernels, of_ranks.all.view(), sums, ALL_CAME)
    }

    /// Gives the sums, which the last stage of a pipeline has, to all other stages.
    pub(crate) fn share_over_stages(
        &mut self,
        kernels: &Kernels,
        ranks: &Ranks,
    ) -> Result<(), KernelError> {
        let sums = self.sums_and_scale.view_mut().rows(0..self.parts);
        // SAFETY: the computation waits for it, and the sums live as long as kernels have work.
        unsafe { from_last_stage(kernels, ranks, sums) }
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
