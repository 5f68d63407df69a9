//! The phase of a step, and the part of the model.

use crate::each::each;
use serde::{Serialize, Serializer};

each! {
    /// The phase that the trainer is in.
    Phase,
    /// One value per phase.
    ByPhase {
        /// Arenas are leased and filled, before step 1.
        Load = load,
        /// Forward pass.
        Forward = forward,
        /// A dropped activation is replayed.
        Recompute = recompute,
        /// Backward pass.
        Backward = backward,
        /// Gradient norm, clipping and the update.
        Optimizer = optimizer,
        /// Loss on held-out data.
        Eval = eval,
        /// State is written to disk.
        Checkpoint = checkpoint,
    }
}

/// A part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Layer {
    /// The token embedding.
    Embedding,
    /// A transformer block, from 0.
    Block(usize),
    /// Final norm, output head and loss.
    Head,
    /// Outside the model: arenas, the optimizer.
    Whole,
}

impl Layer {
    /// The block's number; none for other layers.
    pub fn block(self) -> Option<usize> {
        match self {
            Layer::Block(block) => Some(block),
            _ => None,
        }
    }
}

impl std::fmt::Display for Layer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Layer::Embedding => write!(f, "embedding"),
            Layer::Block(block) => write!(f, "block {block}"),
            Layer::Head => write!(f, "head"),
            Layer::Whole => write!(f, "whole model"),
        }
    }
}

impl Serialize for Layer {
    /// The block's number, or null: the form of `peak_layer` in the metrics.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.block().serialize(serializer)
    }
}

/// A phase and a part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The phase that the trainer is in.
    pub phase: Phase,
    /// Where in the model.
    pub layer: Layer,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, {}", self.layer, self.phase.name())
    }
}
