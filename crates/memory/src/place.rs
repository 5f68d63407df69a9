//! Where in a step, and where in the model, something happens.

use serde::{Deserialize, Serialize, Serializer};

/// What the trainer is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Arenas are leased and filled, before step 1.
    Load,
    /// Forward pass.
    Forward,
    /// A dropped activation is made again.
    Recompute,
    /// Backward pass.
    Backward,
    /// Gradient norm, clipping and the update.
    Optimizer,
    /// Loss on held-out data.
    Eval,
    /// State is written to disk.
    Checkpoint,
}

impl Phase {
    /// All phases, in the order of every report.
    pub const ALL: [Phase; 7] = [
        Phase::Load,
        Phase::Forward,
        Phase::Recompute,
        Phase::Backward,
        Phase::Optimizer,
        Phase::Eval,
        Phase::Checkpoint,
    ];

    /// The name used in files.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Load => "load",
            Phase::Forward => "forward",
            Phase::Recompute => "recompute",
            Phase::Backward => "backward",
            Phase::Optimizer => "optimizer",
            Phase::Eval => "eval",
            Phase::Checkpoint => "checkpoint",
        }
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
    /// The block's number; nothing for other layers.
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
    /// What the trainer is doing.
    pub phase: Phase,
    /// Where in the model.
    pub layer: Layer,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, {}", self.layer, self.phase.name())
    }
}

/// One value for each phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByPhase<T> {
    /// Value for [`Phase::Load`].
    pub load: T,
    /// Value for [`Phase::Forward`].
    pub forward: T,
    /// Value for [`Phase::Recompute`].
    pub recompute: T,
    /// Value for [`Phase::Backward`].
    pub backward: T,
    /// Value for [`Phase::Optimizer`].
    pub optimizer: T,
    /// Value for [`Phase::Eval`].
    pub eval: T,
    /// Value for [`Phase::Checkpoint`].
    pub checkpoint: T,
}

impl<T> ByPhase<T> {
    /// The value of one phase.
    pub fn get(&self, phase: Phase) -> &T {
        match phase {
            Phase::Load => &self.load,
            Phase::Forward => &self.forward,
            Phase::Recompute => &self.recompute,
            Phase::Backward => &self.backward,
            Phase::Optimizer => &self.optimizer,
            Phase::Eval => &self.eval,
            Phase::Checkpoint => &self.checkpoint,
        }
    }

    /// The value of one phase, to change.
    pub fn get_mut(&mut self, phase: Phase) -> &mut T {
        match phase {
            Phase::Load => &mut self.load,
            Phase::Forward => &mut self.forward,
            Phase::Recompute => &mut self.recompute,
            Phase::Backward => &mut self.backward,
            Phase::Optimizer => &mut self.optimizer,
            Phase::Eval => &mut self.eval,
            Phase::Checkpoint => &mut self.checkpoint,
        }
    }
}
