//! What a step computed and used, and what the host knows of it while the device may still be at it.

use crate::read_back::PendingNumbers;
use crate::routers::RouterChoices;
use kernels::{KernelError, Kernels, StepTraffic, Traffic};
use memory::StepMemory;
use model::{ReplayCounts, UnderflowShare};
use settings::StepObjective;
use std::cell::Cell;
use std::time::Instant;

/// A step that the device may still be at: all that the host knows of it.
pub(crate) struct InFlight {
    pub(crate) step: usize,
    pub(crate) lr: f64,
    pub(crate) lr_matrices: Option<f64>,
    pub(crate) targets: usize,
    pub(crate) objective: StepObjective,
    /// The divisor of the losses: targets, or pairs; 1 for a policy, whose targets have weights.
    pub(crate) counted: usize,
    pub(crate) tokens: usize,
    pub(crate) memory: StepMemory,
    pub(crate) crossed: StepTraffic,
    pub(crate) micro_batch: StepTraffic,
    pub(crate) replayed: ReplayCounts,
    /// The parts of the loss ([`model::LossPart`]).
    pub(crate) losses: PendingNumbers,
    pub(crate) norm_and_clip: PendingNumbers,
    /// The experts of a router, and the choices of all.
    pub(crate) choices: Option<(usize, PendingNumbers)>,
    pub(crate) underflows: Option<PendingNumbers>,
    /// When it was made, or first known to be.
    pub(crate) made_at: Cell<Option<Instant>>,
}

/// What a step computed and used.
#[derive(Clone, Debug)]
pub struct StepOutcome {
    /// The step, from 1.
    pub step: usize,
    /// Mean over all targets, or pairs, of the step; for a policy the sum by the weights of targets.
    pub loss: f32,
    /// Rewards of the step's pairs, if the loss is that of preferences.
    pub rewards: Option<Rewards>,
    /// The distance from the reference and the clipped share, if the loss is that of a policy gradient.
    pub policy: Option<PolicyNumbers>,
    /// What routers' losses of balance and of the size of logits add to it, if the model has such.
    pub router_losses: Option<[f32; 2]>,
    /// Global norm of the gradients before clipping.
    pub grad_norm: f32,
    /// Learning rate.
    pub lr: f64,
    /// That of matrices that the optimizer updates as a whole, if it does.
    pub lr_matrices: Option<f64>,
    /// Targets counted.
    pub targets: usize,
    /// Tokens read, masked ones included.
    pub tokens: usize,
    /// Memory.
    pub memory: StepMemory,
    /// Bytes between host, device and disk. The update is the step's own, wherever that falls; where it had to be made before
    /// the next forward pass, units of weights came for it that are not counted.
    pub traffic: Traffic,
    /// The same by what they are for.
    pub crossed: StepTraffic,
    /// Traffic of the last micro-batch. Every micro-batch but the first moves as much. In a pipeline it is that of the last pass alone.
    pub micro_batch: StepTraffic,
    /// Replays of each stage.
    pub replayed: ReplayCounts,
    /// What the routers chose, if the model has some.
    pub router_choices: Option<RouterChoices>,
    /// The share of each operand in FP8 that underflowed, over all ranks; empty if no product is in FP8.
    pub fp8_underflows: Vec<UnderflowShare>,
    /// When it was made, or known to be made.
    pub done_at: Instant,
}

/// Means over the pairs of a step. A sequence's reward is beta times how much likelier it is than under the model that the
/// training began with, in log-probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rewards {
    /// The mean reward of chosen sequences.
    pub chosen: f32,
    /// The mean reward of rejected sequences.
    pub rejected: f32,
    /// How much larger those of chosen sequences are.
    pub margin: f32,
    /// The share of pairs whose chosen sequence has the larger one.
    pub accuracy: f32,
}

/// Means over a step's targets by their weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PolicyNumbers {
    /// How far the model is from the reference: of q, by how much likelier the reference makes the target in log-probability, the mean of
    /// exp(q) - q - 1. 0 without a reference.
    pub kl: f32,
    /// The share of targets whose ratio is clipped.
    pub clip_share: f32,
}

impl StepOutcome {
    /// Whether loss and gradients are finite. If not, the step was skipped: weights and optimizer states are as they
    /// were. Where gradients are released, that is so of the parts whose own are not finite, and of all if the loss is not.
    pub fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.grad_norm.is_finite()
    }
}

impl InFlight {
    /// Notes the time if the step is made. To be called often while the next step is asked for: where the device takes only so many
    /// launches ahead, asking for a step takes nearly as long as the step.
    pub(crate) fn note_if_made(&self, kernels: &Kernels) {
        if self.made_at.get().is_none() && self.norm_and_clip.have_come(kernels) {
            self.made_at.set(Some(Instant::now()));
        }
    }

    /// Waits for it.
    pub(crate) fn finish(self, kernels: &Kernels) -> Result<StepOutcome, KernelError> {
        let losses = self.losses.finish(kernels)?;
        let grad_norm = self.norm_and_clip.finish(kernels)?[0];
        let router_choices = match self.choices {
            Some((experts, counts)) => Some(RouterChoices {
                experts,
                counts: counts.finish(kernels)?,
            }),
            None => None,
        };
        let fp8_underflows = match self.underflows {
            Some(counts) => UnderflowShare::of_counts(&counts.finish(kernels)?),
            None => Vec::new(),
        };
        let mean = |sum: f32| f64::from(sum) / self.counted as f64;
        let (mut router_losses, mut rewards, mut policy) = (None, None, None);
        match (self.objective, &losses[1..]) {
            (StepObjective::Policy, [kl, clipped, weights]) => {
                policy = Some(PolicyNumbers {
                    kl: kl / weights,
                    clip_share: clipped / weights,
                });
            }
            (_, [chosen, rejected, preferred]) => {
                rewards = Some(Rewards {
                    chosen: mean(*chosen) as f32,
                    rejected: mean(*rejected) as f32,
                    margin: (mean(*chosen) - mean(*rejected)) as f32,
                    accuracy: mean(*preferred) as f32,
                });
            }
            (_, [aux, z]) => router_losses = Some([*aux, *z]),
            _ => {}
        }
        Ok(StepOutcome {
            step: self.step,
            loss: mean(losses[0]) as f32,
            rewards,
            policy,
            router_losses,
            grad_norm,
            lr: self.lr,
            lr_matrices: self.lr_matrices,
            targets: self.targets,
            tokens: self.tokens,
            memory: self.memory,
            traffic: self.crossed.total(),
            crossed: self.crossed,
            micro_batch: self.micro_batch,
            replayed: self.replayed,
            router_choices,
            fp8_underflows,
            done_at: self.made_at.get().unwrap_or_else(Instant::now),
        })
    }
}
