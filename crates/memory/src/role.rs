//! What training does to a parameter.

/// What training does to a parameter. Weights have them all; gradients, optimizer states and the norm see those that are
/// trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Role {
    /// Updated by its gradient.
    #[default]
    Trained,
    /// Left as it is: it has no gradient, no optimizer state and no master.
    Frozen,
    /// Statistics of a model rather than a weight: declared as f32 whatever the compute type is, the same on all ranks, which do not divide
    /// it, and changed by rules of its own. Saved with the weights.
    Buffer,
}

impl Role {
    /// Whether it has a gradient.
    pub fn is_trained(self) -> bool {
        self == Role::Trained
    }
}
