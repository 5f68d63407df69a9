//! What an optimizer is: which states it keeps of a parameter, and how it updates a range of them. Where states live, and how
//! they come and go, is the same for all.

use crate::moment::Moment;
use crate::numbers::StepNumbers;
use kernels::{KernelError, Kernels, MasterOperand, MomentOperand, Operation, Queue};
use memory::{Cover, DType, In, Out};
use std::ops::Deref;

/// What an optimizer keeps of the parameters of its group.
pub(crate) trait Keeps {
    /// The states that it keeps of every parameter, beside what stands beside the weights.
    fn moments(&self) -> &'static [Moment];

    /// How many numbers of a step it needs on the device.
    fn rate_count(&self) -> usize;

    /// These numbers.
    fn rates(&self, step: &StepNumbers) -> Vec<f32>;
}

/// An optimizer that updates any range of its group by itself.
pub(crate) trait ByRange: Keeps {
    /// Asks for the update of a range. If the clipping factor is not finite, nothing is changed.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    fn update(&self, on: &Asking, update: Update) -> Result<(), KernelError>;
}

/// An optimizer that updates a matrix as a whole, in three steps. The first and the last may be made of ranges of it, wherever
/// they are: the one in the middle needs all of it in one place.
pub(crate) trait ByMatrix: Keeps {
    /// The type of directions.
    fn dtype(&self) -> DType;

    /// Scratch that [`ByMatrix::transform`] needs for a matrix of this shape, in bytes.
    fn scratch_bytes(&self, shape: [usize; 2]) -> usize;

    /// Asks for the moments' step, and for the direction of a range, `out [n]`. It takes the moments out of the update.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    fn direct(&self, on: &Asking, update: &mut Update, out: Out) -> Result<(), KernelError>;

    /// Asks for the direction of a whole matrix to be made what weights move along. `rates` are those of the step.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    fn transform(
        &self,
        on: &Asking,
        shape: [usize; 2],
        direction: Out,
        scratch: Out,
        rates: In,
    ) -> Result<(), KernelError>;

    /// Asks for the step of a range's weights. If the clipping factor is not finite, they stay as they are.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    fn apply(
        &self,
        on: &Asking,
        update: Update,
        matrix: &Matrix,
        direction: In,
    ) -> Result<(), KernelError>;
}

/// An optimizer. Implemented in a file of its own, and listed in [`crate::OptimizerKind`].
pub(crate) enum Rule {
    Ranges(Box<dyn ByRange>),
    Matrices(Box<dyn ByMatrix>),
}

impl Deref for Rule {
    type Target = dyn Keeps;

    fn deref(&self) -> &(dyn Keeps + 'static) {
        match self {
            Rule::Ranges(rule) => &**rule,
            Rule::Matrices(rule) => &**rule,
        }
    }
}

/// A matrix that is updated as a whole.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// Its index in the layout.
    pub entry: usize,
    /// Its shape, as the layout has it.
    pub shape: [usize; 2],
    /// Its shape in files: the same, or transposed.
    pub stored: [usize; 2],
}

/// Parameters that are updated by one rule.
pub(crate) struct Group {
    pub(crate) rule: Rule,
    pub(crate) cover: Cover,
    /// The matrices of which the cover is, padding included, where the rule updates these as a whole.
    pub(crate) matrices: Vec<Matrix>,
}

/// What the update of a range reads and writes, on the device.
pub(crate) struct Update<'a> {
    /// `[n]` f32 or bf16.
    pub(crate) weights: Out<'a>,
    /// What stands beside the weights.
    pub(crate) master: MasterOperand<'a>,
    /// The states, in the order of [`Keeps::moments`].
    pub(crate) moments: Vec<MomentOperand<'a>>,
    /// `[n]` f32 or bf16, before clipping.
    pub(crate) gradients: In<'a>,
    /// f32: [`Keeps::rates`].
    pub(crate) rates: In<'a>,
    /// `[2]` f32: the norm of all gradients, and the factor on them.
    pub(crate) clip: In<'a>,
    /// `[2]` u32: the key of the step's random numbers.
    pub(crate) key: In<'a>,
    /// What the range's first element counts as in random numbers.
    pub(crate) first_index: u64,
    /// Decoupled weight decay of these parameters.
    pub(crate) weight_decay: f32,
}

/// Whom the operations of an update are asked of.
pub(crate) struct Asking<'a> {
    kernels: &'a dyn Kernels,
    queue: Queue,
}

impl<'a> Asking<'a> {
    /// Asks in a queue.
    ///
    /// # Safety
    /// What is asked for keeps the promise of [`kernels::Run::start`].
    pub(crate) unsafe fn new(kernels: &'a dyn Kernels, queue: Queue) -> Asking<'a> {
        Asking { kernels, queue }
    }

    /// Asks in the queue of the computation.
    pub(crate) fn in_computation(kernels: &'a dyn Kernels) -> Asking<'a> {
        // SAFETY: there is nothing to promise there.
        unsafe { Asking::new(kernels, Queue::Compute) }
    }

    /// Asks for an operation.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub(crate) fn run<'b>(&self, operation: impl Into<Operation<'b>>) -> Result<(), KernelError> {
        // SAFETY: the promise of whoever made this.
        unsafe { self.kernels.start(self.queue, operation) }
    }
}
