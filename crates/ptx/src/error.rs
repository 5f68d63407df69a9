//! What is wrong with a text, a launch or a kernel.

use thiserror::Error;

/// A module could not be read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line} of the PTX: {message}")]
pub struct ParseError {
    /// The line, from 1.
    pub line: u32,
    /// What is wrong there.
    pub message: String,
}

/// A launch failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LaunchError {
    /// A device would refuse the launch, or the arguments are not those of the kernel.
    #[error("{kernel}: {message}")]
    Launch {
        /// What was to be launched.
        kernel: String,
        /// Why it is refused.
        message: String,
    },
    /// A kernel did what has no meaning.
    #[error(transparent)]
    Mistake(#[from] Box<Mistake>),
}

/// What a kernel did wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{kernel}, line {line} of the PTX, block {block:?}, thread {thread:?}: {message}\n    {text}"
)]
pub struct Mistake {
    /// The kernel's name.
    pub kernel: String,
    /// The line of the instruction, from 1.
    pub line: u32,
    /// That line.
    pub text: String,
    /// The block, as `%ctaid`.
    pub block: [u32; 3],
    /// The thread, as `%tid`; of several the first.
    pub thread: [u32; 3],
    /// What it is.
    pub kind: MistakeKind,
    /// What it is, with the numbers.
    pub message: String,
}

/// What a kernel can do wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MistakeKind {
    /// An access outside of every allocation, shared array, variable or parameter, or in the wrong space.
    OutOfBounds,
    /// An access whose address is no multiple of its size.
    Misaligned,
    /// A read of bytes that nobody wrote, or whose asynchronous copy was not waited for.
    Uninitialised,
    /// Two accesses, one of them a write, that nothing orders.
    Race,
    /// A barrier that not all threads outside.
    Barrier,
    /// An instruction of several lanes in which some do not take part, or that reads a lane that does not.
    Lanes,
    /// An asynchronous copy that its thread never waited for.
    Unfinished,
    /// A division by zero, or an operand without meaning.
    Meaningless,
    /// More instructions than any kernel of a test takes.
    Endless,
}

/// What is wrong, before the machine adds where.
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
