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
    /// The choices of all ranks, `[routers experts]` f32.
    pub(crate) of_ranks: SumOfRanks,
}

/// How often each router chose each of its experts in a step, over all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterChoices {
    pub(crate) experts: usize,
    pub(crate) counts: Vec<f32>,
}

impl Routers {
    /// The routers of a model, if it has some.
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

    /// Moves the biases unless the step is skipped, and sends for the choices of all ranks. `own` has this rank's choices, and `clip` says
    /// whether the step is skipped ([`kernels::NormAndClip`]). Returns the experts of a router, and the choices.
    pub(crate) fn end_step(
        &self,
        kernels: &Kernels,
        weights: &mut Weights,
        own: In,
        clip: In,
    ) -> Result<(usize, PendingNumbers), KernelError> {
        let choices = self.of_ranks.sum(own);
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
        Ok((self.experts, PendingNumbers::start(kernels, choices)?))
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
            let counts = counts.iter().map(|count| f64::from(*count));
            let most = counts.clone().fold(0.0, f64::max);
            most * counts.len() as f64 / counts.sum::<f64>()
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
