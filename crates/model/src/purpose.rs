//! What a micro-batch passes through the model for.

use crate::{CachedSequences, PassHooks};
use memory::{In, Out, Phase};
use units::Gradients;

/// What a micro-batch passes through the model for.
#[allow(
    clippy::large_enum_variant,
    reason = "there is one of it, and it lives as long as the pass"
)]
pub enum Purpose<'a> {
    /// A training step: forward and backward.
    Training(Training<'a>),
    /// A forward pass alone: nothing is dropped out, and every activation goes after its last reader. Where there is a
    /// cache, the tokens of the micro-batch are the last ones of its sequences.
    Inference(Option<CachedSequences<'a>>),
}

/// What a training step has beside the forward pass.
pub struct Training<'a> {
    /// The gradients, which this micro-batch's are added to.
    pub gradients: &'a mut Gradients,
    /// Whether gradients are complete after this micro-batch.
    pub is_last_micro_batch: bool,
    /// The loss of the step so far.
    pub loss: StepLoss<'a>,
    /// What else happens meanwhile.
    pub hooks: &'a mut dyn PassHooks,
}

/// The loss that the micro-batches of one step add up.
pub struct StepLoss<'a> {
    /// `[1]` f32: sum of the losses of all targets so far.
    pub sum: Out<'a>,
    /// Whether nothing has been added yet.
    pub is_first: bool,
    /// `[1]` f32: gradients are multiplied by this, 1 / targets of the whole step.
    pub gradient_scale: In<'a>,
}

impl<'a> Purpose<'a> {
    /// What a backward pass works on.
    ///
    /// # Panics
    /// If this is a forward pass alone.
    pub(crate) fn training(&mut self) -> &mut Training<'a> {
        match self {
            Purpose::Training(training) => training,
            Purpose::Inference(_) => panic!("only training steps go backward"),
        }
    }

    /// What a forward pass counts as.
    pub(crate) fn forward_phase(&self) -> Phase {
        match self {
            Purpose::Training(_) => Phase::Forward,
            Purpose::Inference(_) => Phase::Eval,
        }
    }
}
