//! What a stage of a pipeline does in a step: passes of micro-batches, and exchanges with its neighbours.

/// A pass of a micro-batch through a virtual stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PassKind {
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
    /// Both, one after the other: the last virtual stage, whose head computes a loss and its gradient together, and a run without a
    /// pipeline.
    ForwardBackward,
}

impl PassKind {
    /// Whether a micro-batch begins with it.
    pub fn is_forward(self) -> bool {
        self != PassKind::Backward
    }

    /// Whether a micro-batch ends with it.
    pub fn is_backward(self) -> bool {
        self != PassKind::Forward
    }
}

/// What a stage does with a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskKind {
    /// A pass.
    Pass(PassKind),
    /// The gradients of matrices that its backward pass has deferred.
    DeferredGradients,
}

impl TaskKind {
    /// The pass that it is, if it is one.
    pub fn pass(self) -> Option<PassKind> {
        match self {
            TaskKind::Pass(pass) => Some(pass),
            TaskKind::DeferredGradients => None,
        }
    }

    pub(super) fn is_forward(self) -> bool {
        self.pass().is_some_and(PassKind::is_forward)
    }

    pub(super) fn is_backward(self) -> bool {
        self.pass().is_some_and(PassKind::is_backward)
    }
}

/// What one stage makes for another: the residual stream between two blocks, or its gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Carried {
    /// The virtual stage whose input it is, or the gradient of whose input.
    pub input_of: usize,
    /// Whether it is the gradient, which goes to the virtual stage before; otherwise the activation, which comes from there.
    pub is_gradient: bool,
    /// The micro-batch, by its number among this rank's.
    pub micro_batch: usize,
}

impl Carried {
    /// The stage that makes it, of so many.
    pub(super) fn sender(self, stages: usize) -> usize {
        (self.input_of - usize::from(!self.is_gradient)) % stages
    }

    pub(super) fn receiver(self, stages: usize) -> usize {
        (self.input_of - usize::from(self.is_gradient)) % stages
    }
}

/// A transfer as one of its two stages sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handover {
    /// What crosses.
    pub of: Carried,
    /// Whether this stage sends it; otherwise it receives it.
    pub is_sent: bool,
}

impl Handover {
    /// The stage at its other end, of so many.
    pub fn peer(self, stages: usize) -> usize {
        match self.is_sent {
            true => self.of.receiver(stages),
            false => self.of.sender(stages),
        }
    }
}

/// A task of a stage, in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderedTask {
    /// What it does.
    pub kind: TaskKind,
    /// The virtual stage, counted over the whole pipeline.
    pub virtual_stage: usize,
    /// The micro-batch, by its number among this rank's.
    pub micro_batch: usize,
}

/// A task of a stage, and the exchanges before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageTask {
    /// What is exchanged before it, one exchange after the other.
    pub exchanges: Vec<Vec<Handover>>,
    /// What is done, with which micro-batch.
    pub of: OrderedTask,
    /// Which of the virtual stage's tables of activations the micro-batch has.
    pub table: usize,
}

/// All that a stage does in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageSchedule {
    /// Its tasks, in order.
    pub tasks: Vec<StageTask>,
    /// What is exchanged after the last.
    pub last: Vec<Vec<Handover>>,
}
