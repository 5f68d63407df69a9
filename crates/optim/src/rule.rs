//! What an optimizer is: which states it keeps of a parameter, and how it updates a range of them. Where states live, and how
//! they come and go, is the same for all.

use crate::moment::Moment;
use kernels::{
    Exchange, ExchangeBytes, KernelError, Kernels, MasterOperand, MomentOperand, Operation, Queue,
};
use memory::{Cover, DType, Entry, In, Out};
use std::ops::Deref;

const COMPLETE: &str = "what a rank has of a tensor is complete before it is sent";
const CAME: &str = "what other ranks have of a tensor has come before it is used";

/// The numbers of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepNumbers {
    /// The step, from 1: with `seed` the key of the step's random numbers.
    pub step: usize,
    /// The update, from 1: unlike `step` it does not count skipped steps. Decides bias corrections.
    pub update: usize,
    /// The learning rate.
    pub learning_rate: f64,
    /// That of matrices that are updated as a whole.
    pub matrix_rate: f64,
    /// The run's seed.
    pub seed: u64,
}

/// What an optimizer keeps of the parameters of its group.
pub(crate) trait Keeps {
    /// The states that it keeps of every parameter, beside what stands beside the weights.
    fn moments(&self) -> &'static [Moment];

    /// The states that it keeps of a tensor as a whole, f32: what they are called, and how many elements they have. Every rank
    /// has them on its device.
    fn tensor_states(&self, _tensor: &WholeTensor) -> Vec<(&'static str, usize)> {
        Vec::new()
    }

    /// How many numbers of a step it needs on the device.
    fn rate_count(&self) -> usize;

    /// These numbers.
    fn rates(&self, step: &StepNumbers) -> Vec<f32>;
}

/// An optimizer that updates any range of its group by itself.
pub(crate) trait ByRange: Keeps {
    /// Asks for the update of a range. If the clipping factor is not finite, nothing is changed.
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
    fn direct(&self, on: &Asking, update: &mut Update, out: Out) -> Result<(), KernelError>;

    /// Asks for the direction of a whole matrix to be made what weights move along. `rates` are those of the step.
    fn transform(
        &self,
        on: &Asking,
        shape: [usize; 2],
        direction: Out,
        scratch: Out,
        rates: In,
    ) -> Result<(), KernelError>;

    /// Asks for the step of a range's weights. If the clipping factor is not finite, they stay as they are.
    fn apply(
        &self,
        on: &Asking,
        update: Update,
        matrix: &WholeTensor,
        direction: In,
    ) -> Result<(), KernelError>;
}

/// Sums over a tensor, f64, to which every range of it adds its own.
pub(crate) enum Sums {
    /// So many, which add up exactly in any order.
    Exact(usize),
    /// So many of each block of [`kernels::quantise::BLOCK`] elements of the tensor, which no range divides.
    OfBlocks(usize),
}

/// What the update of a tensor by its sums goes by, beside its ranges.
pub(crate) struct Summed<'a> {
    pub(crate) tensor: &'a WholeTensor,
    /// In the order of [`Keeps::tensor_states`].
    pub(crate) states: Vec<Out<'a>>,
    /// [`BySums::scratch_bytes`] of u8, which stay over all sweeps.
    pub(crate) scratch: Out<'a>,
    /// f64: sums of squares of its gradients, before clipping, by grains of the norm.
    pub(crate) norm_grains: In<'a>,
    /// As in [`Update`].
    pub(crate) rates: In<'a>,
    /// As in [`Update`].
    pub(crate) clip: In<'a>,
}

/// An optimizer whose update of a tensor goes by sums over all of it. A sweep goes over all ranges, wherever they are, and adds up
/// some of the sums; the next one may go by these.
pub(crate) trait BySums: Keeps {
    /// The sums of each sweep.
    fn sweeps(&self, tensor: &WholeTensor) -> Vec<Sums>;

    /// Bytes of scratch for a tensor, beside its sums.
    fn scratch_bytes(&self, tensor: &WholeTensor) -> usize;

    /// Before the first sweep.
    fn begin(&self, on: &Asking, summed: &mut Summed) -> Result<(), KernelError>;

    /// Asks for the sums (f64) of a range, which begins at this element of the tensor: all exact ones, or each of those of its blocks.
    fn sum(
        &self,
        on: &Asking,
        sweep: usize,
        summed: &mut Summed,
        range: (usize, Update),
        sums: Vec<Out>,
    ) -> Result<(), KernelError>;

    /// Ends a sweep, with all sums: exact ones in a row for each range, those of blocks in a row each.
    fn end_sweep(
        &self,
        on: &Asking,
        sweep: usize,
        summed: &mut Summed,
        sums: In,
    ) -> Result<(), KernelError>;

    /// Asks for the step of a range. If the clipping factor is not finite, it stays as it is.
    fn apply(
        &self,
        on: &Asking,
        summed: &mut Summed,
        range: (usize, Update),
    ) -> Result<(), KernelError>;
}

/// An optimizer. Implemented in a file of its own, and listed in [`crate::OptimizerKind`].
pub(crate) enum Rule {
    Ranges(Box<dyn ByRange>),
    Matrices(Box<dyn ByMatrix>),
    Sums(Box<dyn BySums>),
}

impl Deref for Rule {
    type Target = dyn Keeps;

    fn deref(&self) -> &(dyn Keeps + 'static) {
        match self {
            Rule::Ranges(rule) => &**rule,
            Rule::Matrices(rule) => &**rule,
            Rule::Sums(rule) => &**rule,
        }
    }
}

/// A tensor that is updated as a whole: a matrix, several of one shape, or a vector, which is one row.
#[derive(Clone, Debug, PartialEq)]
pub struct WholeTensor {
    /// Its index in the layout.
    pub entry: usize,
    /// How many matrices it is.
    pub count: usize,
    /// The shape of each, as the layout has it.
    pub shape: [usize; 2],
    /// That shape in files, where the optimizer goes by it: the same, or transposed.
    pub stored: [usize; 2],
}

impl WholeTensor {
    /// Elements of all matrices.
    pub(crate) fn elements(&self) -> usize {
        self.count * self.shape[0] * self.shape[1]
    }

    /// A trained tensor of a layout.
    pub(crate) fn of_entry((entry, tensor): (usize, &Entry)) -> WholeTensor {
        let (of_all, of_one) = tensor.shape.split_at(tensor.shape.len().saturating_sub(2));
        let shape = match *of_one {
            [rows, columns] => [rows, columns],
            _ => [1, tensor.elements()],
        };
        WholeTensor {
            entry,
            count: of_all.iter().product(),
            shape,
            stored: shape,
        }
    }
}

/// Parameters that are updated by one rule.
pub(crate) struct ParameterGroup {
    pub(crate) rule: Rule,
    pub(crate) cover: Cover,
    /// The tensors of which the cover is, padding included, where the rule updates these as a whole.
    pub(crate) tensors: Vec<WholeTensor>,
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
    kernels: &'a Kernels,
    queue: Queue,
}

impl<'a> Asking<'a> {
    /// Asks in a queue.
    ///
    /// # Safety
    /// The caller keeps the promise of [`kernels::Kernels::start`] for every operation that it asks for.
    pub(crate) unsafe fn new(kernels: &'a Kernels, queue: Queue) -> Asking<'a> {
        Asking { kernels, queue }
    }

    /// Asks in the queue of the computation.
    pub(crate) fn in_computation(kernels: &'a Kernels) -> Asking<'a> {
        // SAFETY: there is nothing to promise there.
        unsafe { Asking::new(kernels, Queue::Compute) }
    }

    /// Asks for an operation.
    pub(crate) fn run<'b>(&self, operation: impl Into<Operation<'b>>) -> Result<(), KernelError> {
        // SAFETY: the promise of whoever made this.
        unsafe { self.kernels.start(self.queue, operation) }
    }

    /// Asks for an exchange, after what was asked for in this queue, and before what will be.
    pub(crate) fn exchange<'b>(
        &self,
        bytes: ExchangeBytes,
        list: impl FnOnce() -> Exchange<'b> + 'b,
    ) -> Result<(), KernelError> {
        let (kernels, queue) = (self.kernels, self.queue);
        kernels.wait(Queue::Collective, kernels.record(queue)?, COMPLETE)?;
        // SAFETY: this queue, which alone reads and writes the pieces, waits for them, and their memory lives as long.
        unsafe { kernels.start_exchange_of(bytes, Box::new(list)) }?;
        kernels.wait(queue, kernels.record(Queue::Collective)?, CAME)
    }
}
