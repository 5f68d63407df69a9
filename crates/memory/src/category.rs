//! What a lease is for, and in which memory it lies.

use crate::each::each;
use serde::{Deserialize, Serialize};

each! {
    /// The purpose of a lease. The names are those of PyTorch's memory timeline.
    Category,
    /// One value per category.
    EachCategory {
        /// Weights.
        Parameter = parameter,
        /// Gradients of weights.
        Gradient = gradient,
        /// Moments and master weights.
        OptimizerState = optimizer_state,
        /// Activations that the recompute policy keeps for the backward pass.
        Activation = activation,
        /// Everything else within a step. Dropped activations count here, in the forward pass and in a replay.
        Temporary = temporary,
        /// Token ids and targets.
        Input = input,
    }
}

/// Bytes per category.
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
