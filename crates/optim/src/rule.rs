//! What an optimizer is: which states it keeps of a parameter, and how it updates a range of them. Where states live, and how
//! they come and go, is the same for all.

use crate::moment::Moment;
use crate::numbers::StepNumbers;
use kernels::{KernelError, Kernels, MasterOperand, MomentOperand, Operation, Queue};
use memory::{Cover, In, Out};

/// An optimizer, of the parameters of a group. Implemented in a file of its own and listed in [`crate::OptimizerKind`].
pub(crate) trait Rule {
    /// The states that it keeps of every parameter, beside what stands beside the weights.
    fn moments(&self) -> &'static [Moment];

    /// How many numbers of a step it needs on the device.
    fn rate_count(&self) -> usize;

    /// These numbers.
    fn rates(&self, step: &StepNumbers) -> Vec<f32>;

    /// Asks for the update of a range. If the clipping factor is not finite, nothing is changed.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    fn update(&self, on: &Asking, update: Update) -> Result<(), KernelError>;
}

/// Parameters that are updated by one rule.
pub(crate) struct Group {
    pub(crate) rule: Box<dyn Rule>,
    pub(crate) cover: Cover,
}

/// What the update of a range reads and writes, on the device.
pub(crate) struct Update<'a> {
    /// `[n]` f32 or bf16.
    pub(crate) weights: Out<'a>,
    /// What stands beside the weights.
    pub(crate) master: MasterOperand<'a>,
    /// The states, in the order of [`Rule::moments`].
    pub(crate) moments: Vec<MomentOperand<'a>>,
    /// `[n]` f32 or bf16, before clipping.
    pub(crate) gradients: In<'a>,
    /// f32: [`Rule::rates`].
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

    /// Asks for an operation.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub(crate) fn run<'b>(&self, operation: impl Into<Operation<'b>>) -> Result<(), KernelError> {
        // SAFETY: the promise of whoever made this.
        unsafe { self.kernels.start(self.queue, operation) }
    }
}
