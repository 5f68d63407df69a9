//! Forward passes without backward passes, for evaluation and generation, in a training session or without one.

use kernels::Kernels;
use memory::Memory;
use model::{Batch, CachedSequences, Model, Purpose, SavedActivations, Work};
use settings::Pipeline;
use std::ops::Range;
use units::{Ranks, Weights};

/// Evaluates a model and generates text with it: the parts of a session that a forward pass uses.
pub struct Forward<'a> {
    pub(crate) memory: &'a Memory,
    pub(crate) kernels: &'a Kernels,
    pub(crate) model: &'a Model,
    pub(crate) weights: &'a mut Weights,
    pub(crate) saved: &'a mut SavedActivations,
    /// The blocks of the next pass.
    pub(crate) layers: Range<usize>,
    /// The pipeline, and the ranks of its stages; none if this rank has the whole model.
    pub(crate) pipeline: Option<(&'a Pipeline, &'a Ranks)>,
    /// The ranks that train together.
    pub(crate) ranks: Option<&'a Ranks>,
    /// Whether text that is being generated is to be broken off.
    pub(crate) stop: &'a dyn Fn() -> bool,
}

/// Which of two models that share their weights computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhichModel {
    /// The model that is trained, with its adapters if it has some.
    Trained,
    /// The model under the adapters, without them.
    Reference,
}

impl Forward<'_> {
    /// The work for the parts of a batch. With `cached`, its tokens are the last ones of sequences in a cache.
    pub(crate) fn work<'w>(
        &'w mut self,
        batches: &'w [Batch],
        cached: Option<CachedSequences<'w>>,
    ) -> Work<'w> {
        Work {
            memory: self.memory,
            kernels: self.kernels,
            weights: self.weights,
            order: self.model.units_forward(&self.layers).into(),
            saved: self.saved,
            layers: self.layers.clone(),
            batches,
            purpose: Purpose::Inference(cached),
        }
    }

    /// The work for the parts of a batch without a cache, by either model.
    pub(crate) fn work_of<'w>(&'w mut self, which: WhichModel, batches: &'w [Batch]) -> Work<'w> {
        Work {
            purpose: match which {
                WhichModel::Trained => Purpose::Inference(None),
                WhichModel::Reference => Purpose::Reference,
            },
            ..self.work(batches, None)
        }
    }
}
