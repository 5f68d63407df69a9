//! Errors in a text, a launch or a kernel.

use thiserror::Error;

/// A module could not be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line} of the PTX: {message}")]
pub struct ParseError {
    /// The line, from 1.
    pub line: u32,
    /// The message.
    pub message: String,
}

/// A launch failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum LaunchError {
    /// A device would refuse the launch, or the arguments are not those of the kernel.
    #[error("{kernel}: {message}")]
    Launch { kernel: String, message: String },
    /// The kernel did something undefined.
    #[error(transparent)]
    Mistake(#[from] Box<Mistake>),
}

/// A mistake of a kernel, and its place.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{kernel}, line {line} of the PTX{}, block {block:?}, thread {thread:?}: {message}\n    {text}",
    place.as_ref().map(|place| format!(" ({place})")).unwrap_or_default()
)]
pub struct Mistake {
    /// The kernel's name.
    pub kernel: String,
    /// The line of the instruction, from 1.
    pub line: u32,
    /// That line.
    pub text: String,
    /// Its place in the CUDA sources, or why that is not known, where somebody asked for it.
    pub place: Option<String>,
    /// The block, as `%ctaid`.
    pub block: [u32; 3],
    /// The thread, as `%tid`; the first if there are several.
    pub thread: [u32; 3],
    /// Its kind.
    pub kind: MistakeKind,
    /// The message, with its numbers.
    pub message: String,
}

/// Kinds of mistakes of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MistakeKind {
    /// An access outside of every allocation, shared array, variable or parameter, or in the wrong space.
    OutOfBounds,
    /// An access whose address is no multiple of its size.
    Misaligned,
    /// A read of bytes that nobody wrote, or whose asynchronous copy was not waited for.
    Uninitialised,
    /// A read of a register that the thread never wrote.
    Unwritten,
    /// Two accesses, one of them a write, that nothing orders.
    Race,
    /// A barrier that not all threads reach.
    Barrier,
    /// An instruction of several lanes in which some do not take part, or that reads a lane that does not.
    Lanes,
    /// A product of registers without a `wgmma.fence` since they were used, or of shared memory without a `fence.proxy.async` since it was written.
    Unfenced,
    /// A register of a product that is used before `wgmma.wait_group` has waited for the product.
    UnderWay,
    /// An instruction for four warps (`wgmma`, `setmaxnreg`) to which not all four come, or with other operands.
    Group,
    /// An asynchronous copy or product that nobody waited for.
    Unfinished,
    /// A division by zero, or an operand without meaning.
    Meaningless,
    /// More instructions than any kernel of a test takes.
    Endless,
}

/// A mistake before the machine adds its place.
#[derive(Clone, Debug)]
pub(crate) struct Wrong {
    pub(crate) kind: MistakeKind,
    /// The lane that did it; the first active one if there is no single one.
    pub(crate) lane: Option<usize>,
    pub(crate) message: String,
}

impl Wrong {
    pub(crate) fn new(kind: MistakeKind, message: impl Into<String>) -> Wrong {
        Wrong {
            kind,
            lane: None,
            message: message.into(),
        }
    }

    pub(crate) fn of_lane(self, lane: usize) -> Wrong {
        Wrong {
            lane: Some(lane),
            ..self
        }
    }
}

/// The error of a mistake.
pub(crate) fn refuse<T>(kind: MistakeKind, message: impl Into<String>) -> Result<T, Wrong> {
    Err(Wrong::new(kind, message))
}
