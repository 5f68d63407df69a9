//! What a lease is for, and which memory it is in.

use serde::{Deserialize, Serialize};

/// What a lease is for. The names of PyTorch's memory timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Weights.
    Parameter,
    /// Gradients of weights.
    Gradient,
    /// Moments and master weights.
    OptimizerState,
    /// Kept for backward by the recompute policy.
    Activation,
    /// All else within a step, a dropped activation included, in forward and in replay.
    Temporary,
    /// Token ids and targets.
    Input,
}

impl Category {
    /// All categories, in the order of every report.
    pub const ALL: [Category; 6] = [
        Category::Parameter,
        Category::Gradient,
        Category::OptimizerState,
        Category::Activation,
        Category::Temporary,
        Category::Input,
    ];

    /// The name used in files.
    pub fn name(self) -> &'static str {
        match self {
            Category::Parameter => "parameter",
            Category::Gradient => "gradient",
            Category::OptimizerState => "optimizer_state",
            Category::Activation => "activation",
            Category::Temporary => "temporary",
            Category::Input => "input",
        }
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

/// Bytes for each category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByCategory {
    /// Weights.
    pub parameter: u64,
    /// Gradients of weights.
    pub gradient: u64,
    /// Moments and master weights.
    pub optimizer_state: u64,
    /// Kept for backward.
    pub activation: u64,
    /// All else within a step.
    pub temporary: u64,
    /// Token ids and targets.
    pub input: u64,
}

impl ByCategory {
    /// The bytes of one category.
    pub fn get(&self, category: Category) -> u64 {
        match category {
            Category::Parameter => self.parameter,
            Category::Gradient => self.gradient,
            Category::OptimizerState => self.optimizer_state,
            Category::Activation => self.activation,
            Category::Temporary => self.temporary,
            Category::Input => self.input,
        }
    }

    /// The bytes of one category, to change.
    pub fn get_mut(&mut self, category: Category) -> &mut u64 {
        match category {
            Category::Parameter => &mut self.parameter,
            Category::Gradient => &mut self.gradient,
            Category::OptimizerState => &mut self.optimizer_state,
            Category::Activation => &mut self.activation,
            Category::Temporary => &mut self.temporary,
            Category::Input => &mut self.input,
        }
    }

    /// Sum over the categories.
    pub fn total(&self) -> u64 {
        Category::ALL
            .iter()
            .map(|category| self.get(*category))
            .sum()
    }
}
