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
}

impl Role {
    /// Whether it has a gradient.
    pub fn is_trained(self) -> bool {
        self == Role::Trained
    }
}
