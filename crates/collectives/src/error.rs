//! Errors of a group: bytes did not get to another rank.

/// A result with a [`GroupError`], unless another error is named.
pub type Result<T = (), E = GroupError> = std::result::Result<T, E>;

/// Why ranks cannot exchange bytes.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GroupError {
    /// A library is missing or cannot be used: what was looked for, where, and what to do.
    #[error("{0}")]
    Missing(String),
    /// The launcher's environment contradicts itself, or lacks something.
    #[error("{0}")]
    Launch(String),
    /// A library refused something or failed, with what it said.
    #[error("{0}")]
    Failed(String),
    /// Other ranks did not answer in time.
    #[error("{0}")]
    Late(String),
}
