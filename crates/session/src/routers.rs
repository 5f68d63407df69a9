//! The choices of routers over a step: added up over ranks, read for the metrics, and followed by the biases of choices.

use crate::read_back::PendingNumbers;
use crate::sum_of_ranks::SumOfRanks;
use kernels::{KernelError, Kernels, StepRouterBias};
use memory::{In, Layout, Memory, OutOfMemory, Role};
use model::Architecture;
use std::ops::Range;
use units::{Ranks, Weights};

/// The routers of a model, in the order of layers. They have equally many experts.
pub(crate) struct Routers {
    experts: usize,
    /// The bias of each router's choices in the layout; none if its choices have none.
    biases: Vec<Option<Range<usize>>>,
    /// How far a bias moves in a step.
    rate: f32,
    of_ranks: Option<SumOfRanks>,
}

/// Choices of a step on their way to the host.
pub(crate) struct PendingChoices {
    experts: usize,
    counts: PendingNumbers,
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
        let names = ["all_choices", "choices"];
        let of_ranks = SumOfRanks::lease(memory, names, ranks, count * experts)?;
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
            of_ranks,
        }))
    }

    /// Adds up the choices of all ranks, of which `own` are this rank's, `[routers experts]` f32. Comes before the update: weights that are
    /// gathered after it would be waited for.
    ///
    /// # Errors
    /// [`KernelError`] if the device or another rank fails.
    pub(crate) fn add_up(&mut self, kernels: &Kernels, own: In) -> Result<(), KernelError> {
        let of_ranks = self.of_ranks.as_mut();
        of_ranks.map_or(Ok(()), |of_ranks| of_ranks.add_up(kernels, own))
    }

    /// Moves the biases unless the step is skipped, and sends for the choices of all ranks. `own` has this rank's choices, and `clip` says
    /// whether the step is skipped ([`kernels::NormAndClip`]).
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub(crate) fn end_step(
        &self,
        kernels: &Kernels,
        weights: &mut Weights,
        own: In,
        clip: In,
    ) -> Result<PendingChoices, KernelError> {
        let of_ranks = self.of_ranks.as_ref();
        let choices = of_ranks.map_or(own, SumOfRanks::sum);
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
        Ok(PendingChoices {
            experts: self.experts,
            counts: PendingNumbers::start(kernels, choices)?,
        })
    }
}

impl PendingChoices {
    /// Waits for them.
    pub(crate) fn finish(self, kernels: &Kernels) -> Result<RouterChoices, KernelError> {
        Ok(RouterChoices {
            experts: self.experts,
            counts: self.counts.finish(kernels)?,
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
