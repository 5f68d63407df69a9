//! What a lease is for, and which memory it is in.

use crate::indexed::indexed;
use serde::{Deserialize, Serialize};

indexed! {
    /// What a lease is for. The names of PyTorch's memory timeline.
    Category,
    /// A value for each category: bytes.
    ByCategory {
        /// Weights.
        Parameter, parameter = "parameter";
        /// Gradients of weights.
        Gradient, gradient = "gradient";
        /// Moments and master weights.
        OptimizerState, optimizer_state = "optimizer_state";
        /// Kept for backward by the recompute policy.
        Activation, activation = "activation";
        /// All else within a step, a dropped activation included, in forward and in replay.
        Temporary, temporary = "temporary";
        /// Token ids and targets.
        Input, input = "input";
    }
}

/// Which memory a lease is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Space {
    /// The memory that the kernels work in: the GPU's, or the process's own on the CPU device.
    Device,
    /// Page-locked host memory that the GPU's copy engines reach.
    Host,
}

impl Space {
    /// All spaces.
    pub const ALL: [Space; 2] = [Space::Device, Space::Host];
}

impl ByCategory {
    /// Sum over the categories.
    pub fn total(&self) -> u64 {
        Category::ALL
            .map(|category| self.get(category))
            .iter()
            .sum()
    }
}
