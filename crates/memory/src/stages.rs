//! Which stage of a pipeline holds which tensors of a layout.

use crate::{Cover, Rank};

/// Which stage of a pipeline holds what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stages {
    /// This rank's stage.
    pub(crate) own: Rank,
    /// The virtual stage of each entry.
    pub(crate) of_entry: Vec<usize>,
    /// The matrices of other stages, tails included.
    pub(crate) elsewhere: Cover,
}
