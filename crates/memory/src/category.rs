//! What a lease is for, and which memory it is in.

use crate::each::each;
use serde::{Deserialize, Serialize};

each! {
    /// The purpose of a lease, by the names of PyTorch's memory timeline.
    Category,
    /// A value for each category.
    EachCategory {
        /// Weights.
        Parameter = parameter,
        /// Gradients of weights.
        Gradient = gradient,
        /// Moments and master weights.
        OptimizerState = optimizer_state,
        /// Kept for backward by the recompute policy.
        Activation = activation,
        /// All else within a step, a dropped activation included, in forward and in replay.
        Temporary = temporary,
        /// Token ids and targets.
        Input = input,
    }
}

/// Bytes for each category.
pub type ByCategory = EachCategory<u64>;

impl ByCategory {
    /// Sum over the categories.
    pub fn total(&self) -> u64 {
        Category::ALL
            .map(|category| self.get(category))
            .iter()
            .sum()
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
