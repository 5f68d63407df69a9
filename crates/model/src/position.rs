//! Where in a model: a stage, or an activation, of a certain block.

use crate::Activation;

/// A stage of a block, by its number. The embedding's stage has no number, and comes before block 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StagePosition {
    pub(crate) layer: usize,
    pub(crate) stage: Option<usize>,
}

impl StagePosition {
    pub(crate) const EMBEDDING: StagePosition = StagePosition {
        layer: 0,
        stage: None,
    };

    pub(crate) fn new(layer: usize, stage: usize) -> StagePosition {
        StagePosition {
            layer,
            stage: Some(stage),
        }
    }
}

/// An activation of a block. The head's input counts as an activation of one more block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerActivation {
    /// The block, from 0.
    pub layer: usize,
    /// Its activation.
    pub activation: Activation,
}

impl LayerActivation {
    /// The input of a block; that of the head has the number of blocks for its layer.
    pub(crate) fn input_of(layer: usize) -> LayerActivation {
        LayerActivation {
            layer,
            activation: Activation::X,
        }
    }
}

impl std::fmt::Display for LayerActivation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of layer {}", self.activation.name(), self.layer)
    }
}
