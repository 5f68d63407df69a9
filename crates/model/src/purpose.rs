//! Why a micro-batch passes through the model.

use crate::{CachedSequences, PassHooks};
use kernels::Init;
use memory::{In, Out, Phase};
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
}

/// What a training step needs beyond a forward pass.
pub struct Training<'a> {
    /// The gradients to which this micro-batch adds its own.
    pub gradients: &'a mut Gradients,
    /// Whether gradients are complete after this micro-batch.
    pub is_last_micro_batch: bool,
    /// The loss of the step so far.
    pub loss: StepLoss<'a>,
    /// Hooks that run during the pass.
    pub hooks: &'a mut dyn PassHooks,
}

/// The loss that a step's micro-batches sum up.
pub struct StepLoss<'a> {
    /// f32: what [`LossPart`] names so far. A model whose routers have no losses has the first alone.
    pub sums: Out<'a>,
    /// Whether nothing has been added yet, to each.
    pub are_first: [bool; LossPart::COUNT],
    /// Micro-batches of the whole step, over which losses of routers are averaged.
    pub micro_batches: usize,
    /// `[1]` f32: the factor on gradients, 1 / targets of the whole step.
    pub gradient_scale: In<'a>,
}

/// The parts of a step's loss, in the order in which they are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossPart {
    /// The sum of the losses of all targets.
    Targets,
    /// The loss of balance of routers.
    RouterAux,
    /// The loss of routers by the size of their logits.
    RouterZ,
}

impl LossPart {
    /// Number of parts.
    pub const COUNT: usize = 3;
}

impl StepLoss<'_> {
    /// Where a part is added up, `[1]` f32, and what to add to.
    pub(crate) fn part(&mut self, part: LossPart) -> (Out<'_>, Init<'static>) {
        let place = part as usize;
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
            Purpose::Inference(_) => panic!("only training steps go backward"),
        }
    }

    /// The phase that a forward pass counts as.
    pub(crate) fn forward_phase(&self) -> Phase {
        match self {
            Purpose::Training(_) => Phase::Forward,
            Purpose::Inference(_) => Phase::Eval,
        }
    }
}
