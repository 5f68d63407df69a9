//! What the result of an operation is added to.

use memory::In;

/// What an operation's result is added to.
#[derive(Clone, Copy)]
pub enum Init<'a> {
    /// Nothing: the output's contents are replaced.
    Overwrite,
    /// The output's contents.
    Accumulate,
    /// Another tensor of the output's shape and type: a residual connection.
    Add(In<'a>),
}

impl Init<'_> {
    /// How many of `all` rows are used by a result that has only some of them.
    pub(super) fn touched(&self, some: usize, all: usize) -> usize {
        match self {
            Init::Overwrite => all,
            Init::Accumulate | Init::Add(_) => some,
        }
    }
}
