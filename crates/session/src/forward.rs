//! Forward passes alone, for evaluation and generation: with the parts of a training session, or of one without states.

use kernels::Kernels;
use memory::Memory;
use model::{Batch, CachedSequences, Model, Purpose, SavedActivations, Work};
use std::rc::Rc;
use units::Weights;

/// What a forward pass takes of a session.
pub(crate) struct Forward<'a> {
    pub(crate) memory: &'a Memory,
    pub(crate) kernels: &'a Kernels,
    pub(crate) model: &'a Model,
    pub(crate) weights: &'a mut Weights,
    /// The order in which a pass uses units of weights.
    pub(crate) order: &'a Rc<[usize]>,
    pub(crate) saved: &'a mut SavedActivations,
}

impl Forward<'_> {
    /// The work for a batch, whose tokens may be the last ones of sequences in a cache.
    pub(crate) fn work<'w>(
        &'w mut self,
        batch: &'w Batch,
        cached: Option<CachedSequences<'w>>,
    ) -> Work<'w> {
        Work {
            memory: self.memory,
            kernels: self.kernels,
            weights: self.weights,
            order: self.order,
            saved: self.saved,
            batch,
            purpose: Purpose::Inference(cached),
        }
    }
}
