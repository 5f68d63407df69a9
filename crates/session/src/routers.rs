//! The choices of routers over a step: added up over ranks, read for the metrics, and followed by the biases of choices.

use crate::losses::gather;
use crate::read_back::numbers;
use kernels::{
    Init, KernelError, Kernels, Queue, READING_BYTES_MAX, Reading, StepRouterBias, SumInOrder,
};
use memory::{Buffer, Category, DType, In, Layout, Memory, OutOfMemory, Role};
use model::Architecture;
use std::ops::Range;
use units::{Ranks, Weights};

const COUNTED: &str = "choices are counted before other ranks get them";
const ALL_CAME: &str = "the choices of all ranks have come before they are added up";

/// The routers of a model, in the order of layers. They have equally many experts.
pub(crate) struct Routers {
    experts: usize,
    /// The bias of each router's choices in the layout; none if its choices have none.
    biases: Vec<Option<Range<usize>>>,
    /// How far a bias moves in a step.
    rate: f32,
    of_ranks: Option<OfRanks>,
}

/// The choices of other ranks.
struct OfRanks {
    ranks: usize,
    /// `[ranks routers experts]` f32.
    all: Buffer,
    /// `[routers experts]` f32.
    sum: Buffer,
}

/// Choices of a step on their way to the host.
pub(crate) struct PendingChoices {
    experts: usize,
    parts: Vec<Reading>,
}

/// How often each router chose each of its experts in a step, over all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterChoices {
    experts: usize,
    counts: Vec<f32>,
}

impl Routers {
    /// The routers of a model, if it has some.
    ///
    /// # Errors
    /// [`OutOfMemory`] if room for the choices of other ranks is refused.
    pub(crate) fn lease(
        memory: &Memory,
        (architecture, layout): (&Architecture, &Layout),
        ranks: Option<&Ranks>,
        rate: f64,
    ) -> Result<Option<Routers>, OutOfMemory> {
        let routers = architecture.routers();
        let Some((experts, _)) = routers.first() else {
            return Ok(None);
        };
        let (experts, count) = (*experts, routers.len());
        let lease = |name, rows| {
            memory.lease_persistent(Category::Activation, name, [rows * experts], DType::F32)
        };
        let of_ranks = ranks.map(|ranks| {
            Ok::<_, OutOfMemory>(OfRanks {
                ranks: ranks.of_all().of,
                all: lease("all_choices", ranks.of_all().of * count)?,
                sum: lease("choices", count)?,
            })
        });
        let place = |name: &String| {
            let mut entries = layout.entries().iter();
            let entry = entries.find(|entry| entry.role == Role::Buffer && entry.name == *name);
            entry.map(|entry| entry.range())
        };
        let biases = routers
            .iter()
            .map(|(_, bias)| bias.as_ref().and_then(place));
        Ok(Some(Routers {
            experts,
            biases: biases.collect(),
            rate: rate as f32,
            of_ranks: of_ranks.transpose()?,
        }))
    }

    /// Adds up the choices of all ranks, and moves the biases unless the step is skipped. `own` has this rank's choices,
    /// `[routers experts]` f32, and `clip` says whether the step is skipped ([`kernels::NormAndClip`]).
    pub(crate) fn end_step(
        &mut self,
        kernels: &Kernels,
        weights: &mut Weights,
        own: In,
        clip: In,
    ) -> Result<PendingChoices, KernelError> {
        if let Some(of_ranks) = &mut self.of_ranks {
            of_ranks.add_up(kernels, own)?;
        }
        let choices = match &self.of_ranks {
            Some(of_ranks) => of_ranks.sum.view(),
            None => own,
        };
        let moved = self.biases.iter().enumerate().filter(|_| self.rate > 0.0);
        for (router, bias) in moved {
            let Some(bias) = bias else { continue };
            let counts = router * self.experts..(router + 1) * self.experts;
            kernels.run(StepRouterBias {
                bias: weights.flat_mut(bias.clone()),
                counts: choices.rows(counts),
                clip,
                rate: self.rate,
            })?;
        }
        let (count, at_once) = (choices.elements(), READING_BYTES_MAX / size_of::<f32>());
        let parts = (0..count).step_by(at_once).map(|first| {
            let part = choices.rows(first..count.min(first + at_once));
            kernels.start_read(part)
        });
        Ok(PendingChoices {
            experts: self.experts,
            parts: parts.collect::<Result<_, _>>()?,
        })
    }
}

impl OfRanks {
    fn add_up(&mut self, kernels: &Kernels, own: In) -> Result<(), KernelError> {
        let counted = kernels.record(Queue::Compute)?;
        kernels.wait(Queue::Collective, counted, COUNTED)?;
        // SAFETY: the computation waits for it below, and the choices are written again in the next step.
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
}

impl PendingChoices {
    /// Waits for them.
    pub(crate) fn finish(self, kernels: &Kernels) -> Result<RouterChoices, KernelError> {
        let mut counts = Vec::new();
        for part in self.parts {
            let bytes = kernels.finish_read(part)?;
            counts.extend(numbers(&bytes));
        }
        Ok(RouterChoices {
            experts: self.experts,
            counts,
        })
    }
}

impl RouterChoices {
    /// The counts of each router's experts.
    pub fn routers(&self) -> impl Iterator<Item = &[f32]> {
        self.counts.chunks(self.experts)
    }

    /// For each router, the choices of its most chosen expert over their mean: 1 if all are chosen equally often.
    pub fn max_over_mean(&self) -> Vec<f64> {
        let of_router = |counts: &[f32]| {
            let (most, total) = counts
                .iter()
                .fold((0.0f64, 0.0f64), |(most, total), count| {
                    (most.max(f64::from(*count)), total + f64::from(*count))
                });
            most * counts.len() as f64 / total
        };
        self.routers().map(of_router).collect()
    }

    /// For each router, the entropy of its choices over that of equally many for each expert, from 0 to 1.
    pub fn entropy(&self) -> Vec<f64> {
        let of_router = |counts: &[f32]| {
            let total: f64 = counts.iter().map(|count| f64::from(*count)).sum();
            let shares = counts.iter().map(|count| f64::from(*count) / total);
            let terms = shares.filter(|share| *share > 0.0);
            let entropy: f64 = terms.map(|share| -share * share.ln()).sum();
            match counts.len() {
                1 => 1.0,
                experts => entropy / (experts as f64).ln(),
            }
        };
        self.routers().map(of_router).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_is_one_where_choices_are_even_and_grows_with_the_most_chosen() {
        let choices = RouterChoices {
            experts: 4,
            counts: vec![5.0, 5.0, 5.0, 5.0, 20.0, 0.0, 0.0, 0.0, 2.0, 2.0, 0.0, 0.0],
        };
        assert_eq!(choices.max_over_mean(), [1.0, 4.0, 2.0]);
        let entropy = choices.entropy();
        assert_eq!(entropy[1], 0.0);
        assert!((entropy[0] - 1.0).abs() < 1e-12 && (entropy[2] - 0.5).abs() < 1e-12);
    }
}
