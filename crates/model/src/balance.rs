//! The losses that routers add to that of the targets, and the balance of their choices in a micro-batch.

use crate::position::StagePosition;
use crate::{Batch, RouterAuxKind};
use memory::{Buffer, Category, DType, In, Memory, Out, OutOfMemory};
use std::ops::Range;

/// The coefficients of the losses of routers. Each loss is a mean over the micro-batches of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RouterLosses {
    /// That of the loss of balance; 0: there is none.
    pub aux: f64,
    /// Which choices and scores that loss takes together.
    pub kind: RouterAuxKind,
    /// Experts that a token is sent to.
    pub choices: usize,
    /// That of each router's mean squared log-sum-exp of logits; 0: there is none.
    pub z: f64,
}

/// Choices and scores of every router and sequence of a micro-batch. Routers write them in the forward pass. The loss
/// needs those of all routers, so their gradient is made between the passes.
pub(crate) struct Balance {
    routers: Vec<StagePosition>,
    /// Sequences of a micro-batch.
    sequences: usize,
    /// `[routers sequences, experts]` f32 each: how often each expert was chosen, and its summed scores.
    pub(crate) counts: Buffer,
    pub(crate) sums: Buffer,
    /// The same shape: the gradient of every score of a sequence.
    pub(crate) gradient: Buffer,
}

impl RouterLosses {
    /// How many rows of [`Balance`] the loss of balance takes together, and the factor on the sum of their products,
    /// in a micro-batch of which a step has `micro_batches`. Where sequences have padding, the factor is not divided by
    /// the square of the number of tokens: that depends on lengths, which are on the device.
    pub(crate) fn pooled(
        &self,
        balance: &Balance,
        batch: &Batch,
        micro_batches: usize,
    ) -> (usize, f32) {
        let shape = batch.shape;
        let [routers, sequences] = [balance.routers.len(), balance.sequences];
        let [experts, choices] = [balance.counts.dims()[1], self.choices].map(|count| count as f64);
        let (pooled, tokens, mean_over) = match self.kind {
            RouterAuxKind::Pooled => (routers * sequences, routers * shape.tokens(), 1),
            RouterAuxKind::Layer => (sequences, shape.tokens(), 1),
            RouterAuxKind::Sequence => (1, shape.seq, sequences),
        };
        // transformers' loss counts every choice, so that balanced routers give k; Megatron's divides by k.
        let choices = match self.kind {
            RouterAuxKind::Pooled => 1.0,
            RouterAuxKind::Layer | RouterAuxKind::Sequence => choices,
        };
        let tokens = if batch.lengths().is_some() {
            1.0
        } else {
            tokens as f64
        };
        let mean = choices * tokens * tokens * mean_over as f64 * micro_batches as f64;
        (pooled, (self.aux * experts / mean) as f32)
    }
}

impl Balance {
    /// Room for `routers`, each with its number of experts, which all have equally many.
    pub(crate) fn lease(
        memory: &Memory,
        routers: Vec<(StagePosition, usize)>,
        sequences: usize,
    ) -> Result<Balance, OutOfMemory> {
        let experts = routers[0].1;
        assert!(
            routers.iter().all(|(_, other)| *other == experts),
            "the loss of balance takes routers of equally many experts together"
        );
        let dims = [routers.len() * sequences, experts];
        let lease = |name| memory.lease_persistent(Category::Activation, name, dims, DType::F32);
        Ok(Balance {
            routers: routers.into_iter().map(|(at, _)| at).collect(),
            sequences,
            counts: lease("router_counts")?,
            sums: lease("router_score_sums")?,
            gradient: lease("router_score_gradient")?,
        })
    }

    /// The rows of a router, one for each sequence.
    fn rows(&self, at: StagePosition) -> Range<usize> {
        let router = self.routers.iter().position(|other| *other == at);
        let router = router.expect("every router has rows of its own");
        router * self.sequences..(router + 1) * self.sequences
    }

    /// Where a router writes its counts `[sequences, experts]` and sums.
    pub(crate) fn of_router(&mut self, at: StagePosition) -> [Out<'_>; 2] {
        let rows = self.rows(at);
        [&mut self.counts, &mut self.sums].map(|all| all.view_mut().rows(rows.clone()))
    }

    /// The gradient `[sequences, experts]` of a router's scores.
    pub(crate) fn gradient_of(&self, at: StagePosition) -> In<'_> {
        self.gradient.view().rows(self.rows(at))
    }
}
