//! The loss of a step: a sum over its micro-batches, of which ranks have some each.

use kernels::{Exchange, ExchangeBytes, Init, KernelError, Kernels, Queue, SumInOrder};
use memory::{Buffer, Category, DType, In, Memory, Out, OutOfMemory};
use units::Ranks;

const THERE: &str = "a micro-batch's loss is there before the others get it";
const ALL_CAME: &str = "the losses of all ranks have come before they are added up";

/// Where losses are added up, and what their gradients are multiplied by.
pub(crate) struct Losses {
    /// `[2]` f32: the loss of the step, and 1 / targets of the step, by which gradients are multiplied.
    sum_and_scale: Buffer,
    of_ranks: Option<OfRanks>,
}

/// Losses of single micro-batches, which are added up in their order, whichever rank has them: so the sum has the same bits
/// for any number of ranks.
struct OfRanks {
    ranks: usize,
    /// `[1]` f32: of the micro-batch that is being made.
    current: Buffer,
    /// `[accum]` f32: of this rank.
    own: Buffer,
    /// `[accum, ranks]` f32.
    all: Buffer,
}

/// What the head of a micro-batch works with.
pub(crate) struct CurrentLoss<'a> {
    /// `[1]` f32: what its loss is added to.
    pub(crate) loss: Out<'a>,
    /// Whether that is the micro-batch's own.
    pub(crate) is_alone: bool,
    /// `[1]` f32: 1 / targets of the step.
    pub(crate) gradient_scale: In<'a>,
}

impl Losses {
    pub(crate) fn lease(
        memory: &Memory,
        ranks: Option<&Ranks>,
        accum: usize,
    ) -> Result<Losses, OutOfMemory> {
        let category = Category::OptimizerState;
        let lease =
            |name, elements| memory.lease_persistent(category, name, [elements], DType::F32);
        let of_ranks = ranks.map(|ranks| {
            Ok::<_, OutOfMemory>(OfRanks {
                ranks: ranks.rank.of,
                current: lease("micro_batch_loss", 1)?,
                own: lease("own_losses", accum)?,
                all: lease("all_losses", accum * ranks.rank.of)?,
            })
        });
        Ok(Losses {
            sum_and_scale: lease("loss", 2)?,
            of_ranks: of_ranks.transpose()?,
        })
    }

    /// A step of so many targets begins.
    pub(crate) fn begin_step(
        &mut self,
        kernels: &Kernels,
        targets: usize,
    ) -> Result<(), KernelError> {
        let scale = [1.0 / targets as f32];
        let (_, place) = self.sum_and_scale.view_mut().split_at(1);
        kernels.upload(place, bytemuck::cast_slice(&scale))
    }

    /// What the head of the next micro-batch works with.
    pub(crate) fn current(&mut self) -> CurrentLoss<'_> {
        let (sum, scale) = self.sum_and_scale.view_mut().split_at(1);
        let (loss, is_alone) = match &mut self.of_ranks {
            Some(of_ranks) => (of_ranks.current.view_mut(), true),
            None => (sum, false),
        };
        CurrentLoss {
            loss,
            is_alone,
            gradient_scale: scale.into_in(),
        }
    }

    /// A rank's micro-batch has its loss: the others get it.
    pub(crate) fn made(
        &mut self,
        kernels: &Kernels,
        micro_batch: usize,
    ) -> Result<(), KernelError> {
        match &mut self.of_ranks {
            Some(of_ranks) => of_ranks.made(kernels, micro_batch),
            None => Ok(()),
        }
    }

    /// All micro-batches are made: their losses are added up.
    pub(crate) fn add_up(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        let Some(of_ranks) = &self.of_ranks else {
            return Ok(());
        };
        let came = kernels.record(Queue::Collective)?;
        kernels.wait(Queue::Compute, came, ALL_CAME)?;
        let count = of_ranks.all.dims().elements();
        kernels.run(SumInOrder {
            out: self.sum_and_scale.view_mut().rows(0..1),
            x: of_ranks.all.view().reshape([count, 1]),
            init: Init::Overwrite,
        })
    }

    /// `[1]` f32: of the step.
    pub(crate) fn sum(&self) -> In<'_> {
        self.sum_and_scale.view().rows(0..1)
    }
}

impl OfRanks {
    fn made(&mut self, kernels: &Kernels, micro_batch: usize) -> Result<(), KernelError> {
        let place = micro_batch..micro_batch + 1;
        kernels.run(SumInOrder {
            out: self.own.view_mut().rows(place.clone()),
            x: self.current.view().reshape([1, 1]),
            init: Init::Overwrite,
        })?;
        let there = kernels.record(Queue::Compute)?;
        kernels.wait(Queue::Collective, there, THERE)?;
        let own = self.own.view().rows(place);
        let first = micro_batch * self.ranks;
        let ranks = self.ranks;
        let all = self.all.view_mut();
        let list = move || {
            let places: Vec<_> = (first..first + ranks)
                .map(|place| place..place + 1)
                .collect();
            let places = all.disjoint_rows(&places);
            Exchange {
                sends: (0..ranks).map(|rank| (rank, own)).collect(),
                receives: places.into_iter().enumerate().collect(),
            }
        };
        let bytes = ExchangeBytes::both_ways((ranks - 1) * own.dtype().size_in_bytes());
        // SAFETY: the losses are read after the computation has waited for this, and written again in the next step; they
        // live as long as kernels have work.
        unsafe { kernels.start_exchange_of(bytes, Box::new(list)) }
    }
}
