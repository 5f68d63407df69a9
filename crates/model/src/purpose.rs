//! Why a micro-batch passes through the model.

use crate::{CachedSequences, DeferredGradients};
use kernels::Init;
use memory::{In, Out, Phase};
use optim::Optimizer;
use units::Gradients;

/// Why a micro-batch passes through the model.
#[allow(
    clippy::large_enum_variant,
    reason = "there is one of it, and it lives as long as the pass"
)]
pub enum Purpose<'a> {
    /// A training step: forward and backward.
    Training(Training<'a>),
    /// Only a forward pass: nothing is dropped out, and every activation is released after its last reader. With a
    /// cache, the micro-batch's tokens are the last ones of its sequences.
    Inference(Option<CachedSequences<'a>>),
    /// The same without adapters and without a cache, as part of a training step: what the model under them computes.
    Reference,
}

/// What a training step needs beyond a forward pass.
pub struct Training<'a> {
    /// The gradients to which this micro-batch adds its own.
    pub gradients: &'a mut Gradients,
    /// Updates weights during the pass, if its [`memory::UpdateTime`] says so; none: the pass only computes gradients.
    pub optimizer: Option<&'a mut Optimizer>,
    /// Whether weights may still have to be updated with the gradients of the step before.
    pub is_first_micro_batch: bool,
    /// Whether gradients are complete after this micro-batch.
    pub is_last_micro_batch: bool,
    /// The loss of the step so far; that of each of the micro-batch's parts by itself.
    pub losses: Vec<StepLoss<'a>>,
    /// A place for the gradients of matrices that the backward pass defers; none: it computes them.
    pub deferred: Option<&'a mut DeferredGradients>,
    /// Whether to break the micro-batch off. It is asked before each part of the model, forward and backward; where
    /// gradients are released, only forward.
    pub is_stopped: &'a dyn Fn() -> bool,
}

/// The loss that a step's micro-batches sum up.
pub struct StepLoss<'a> {
    /// f32: what [`LossPart`] names so far: the first alone, or that with those of routers, of preferences or of a policy.
    pub sums: Out<'a>,
    /// Whether nothing has been added yet, to each.
    pub are_first: [bool; LossPart::MOST],
    /// Micro-batches of the whole step, over which losses of routers are averaged.
    pub micro_batches: usize,
    /// `[1]` f32: the factor on gradients, 1 / targets of the whole step, 1 / pairs under preferences, or 1 for a policy.
    pub gradient_scale: In<'a>,
    /// The loss of the head.
    pub of_head: HeadLoss<'a>,
}

/// The loss of the head, with its inputs beside targets.
#[allow(clippy::large_enum_variant, reason = "there is one for a micro-batch")]
#[derive(Clone, Copy)]
pub enum HeadLoss<'a> {
    /// The mean loss of next tokens.
    NextTokens,
    /// The loss of preferences.
    Preferences(Preferences<'a>),
    /// The loss of a policy gradient.
    Policy(PolicyGradient<'a>),
}

/// Direct preference optimisation: every two sequences of a micro-batch are a pair, the chosen one before the rejected one.
#[derive(Clone, Copy)]
pub struct Preferences<'a> {
    /// `[rows]` f32: the sum of each sequence's losses under the model that the training began with.
    pub reference: In<'a>,
    /// The factor on rewards.
    pub beta: f32,
}

/// The clipped loss of a policy gradient ([`kernels::operation::PolicyGradientLoss`]), of targets that an earlier policy wrote. The tensors are
/// `[rows, seq]` f32.
#[derive(Clone, Copy)]
pub struct PolicyGradient<'a> {
    /// The log-probability of each target under the policy that wrote it.
    pub old: In<'a>,
    /// The log-probability of each target under the policy that the model is to stay near.
    pub reference: Option<In<'a>>,
    /// How much better than expected each target is.
    pub advantages: In<'a>,
    /// The share of each target in the step's loss; 0 where it is masked.
    pub weights: In<'a>,
    /// How far below 1 a ratio may fall.
    pub clip_low: f32,
    /// How far above 1 a ratio may rise.
    pub clip_high: f32,
    /// The factor on the distance from the reference.
    pub beta: f32,
    /// Whether a sequence has one ratio.
    pub by_sequence: bool,
}

/// The parts of a step's loss. A step has the first alone, or that with those of routers, of preferences, or of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossPart {
    /// The sum of the losses of all targets, of all pairs, or of a policy's weighed targets.
    Targets,
    /// The loss of balance of routers.
    RouterAux,
    /// The loss of routers by the size of their logits.
    RouterZ,
    /// The rewards of chosen sequences.
    Chosen,
    /// The rewards of rejected sequences.
    Rejected,
    /// The pairs whose chosen sequence has the larger reward.
    Preferred,
    /// The weighed distances of a policy's targets from the reference.
    Kl,
    /// The weights of a policy's targets whose ratio is clipped.
    Clipped,
    /// The weights of all of a policy's targets.
    Weights,
}

impl LossPart {
    /// Number of parts where routers have losses.
    pub const WITH_ROUTERS: usize = 3;
    /// Number of parts under preferences, and of a policy: the most there are.
    pub const MOST: usize = 4;

    /// Its place among the parts of a step.
    fn place(self) -> usize {
        match self {
            LossPart::Targets => 0,
            LossPart::RouterAux | LossPart::Chosen | LossPart::Kl => 1,
            LossPart::RouterZ | LossPart::Rejected | LossPart::Clipped => 2,
            LossPart::Preferred | LossPart::Weights => 3,
        }
    }
}

impl StepLoss<'_> {
    /// Where a part is added up, `[1]` f32, and what to add to.
    pub(crate) fn part(&mut self, part: LossPart) -> (Out<'_>, Init<'static>) {
        let place = part.place();
        let init = match std::mem::take(&mut self.are_first[place]) {
            true => Init::Overwrite,
            false => Init::Accumulate,
        };
        (self.sums.reborrow().rows(place..place + 1), init)
    }
}

impl<'a> Purpose<'a> {
    /// What the backward pass needs.
    ///
    /// # Panics
    /// If this is a forward pass alone.
    pub(crate) fn training(&mut self) -> &mut Training<'a> {
        match self {
            Purpose::Training(training) => training,
            Purpose::Inference(_) | Purpose::Reference => panic!("only training steps go backward"),
        }
    }

    /// The phase that a forward pass counts as.
    pub(crate) fn forward_phase(&self) -> Phase {
        match self {
            Purpose::Training(_) => Phase::Forward,
            Purpose::Inference(_) | Purpose::Reference => Phase::Eval,
        }
    }
}
