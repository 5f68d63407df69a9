//! What training does to a parameter.

/// What training does to a parameter. Arenas of weights hold all roles; gradients, optimizer states and the norm cover
/// only trained parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Role {
    /// Updated by its gradient.
    #[default]
    Trained,
    /// Not changed: it has no gradient, no optimizer state and no master.
    Frozen,
    /// Statistics of a model rather than a weight. It is declared as f32 whatever the compute type is, and changes by
    /// its own rules. All ranks hold the same whole values. Saved with the weights.
    Buffer,
}

impl Role {
    /// Whether it has a gradient.
    pub fn is_trained(self) -> bool {
        self == Role::Trained
    }
}
