//! What an optimizer is: which states it keeps of a parameter, and how it updates a range of them. Where states live,
//! and how they reach the device, is the same for all optimizers.

use crate::moment::Moment;
use kernels::{
    Exchange, ExchangeBytes, Kernels, MasterOperand, MomentOperand, Operation, Queue, Result,
};
use memory::{Cover, DType, Entry, In, Out};
use std::ops::Deref;

const COMPLETE: &str = "what a rank has of a tensor is complete before it is sent";
const CAME: &str = "what other ranks have of a tensor has come before it is used";

/// The numbers of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepNumbers {
    /// The step, from 1. With `seed` it is the key of the step's random numbers.
    pub step: usize,
    /// The update, from 1. Unlike `step` it does not count skipped steps. Bias corrections depend on it.
    pub update: usize,
    /// The learning rate.
    pub learning_rate: f64,
    /// The learning rate of matrices that are updated as a whole.
    pub matrix_rate: f64,
    /// The run's seed.
    pub seed: u64,
}

/// The states and numbers that an optimizer keeps for the parameters of its group.
pub(crate) trait Keeps {
    /// The states that it keeps of every parameter, besides the master states.
    fn moments(&self) -> &'static [Moment];

    /// The f32 states that it keeps of a tensor as a whole, each with its name and its number of elements. Every rank
    /// has all of them on its device.
    fn tensor_states(&self, _tensor: &WholeTensor) -> Vec<(&'static str, usize)> {
        Vec::new()
    }

    /// The number of f32 numbers that it needs on the device in each step.
    fn rate_count(&self) -> usize;

    /// These numbers.
    fn rates(&self, step: &StepNumbers) -> Vec<f32>;
}

/// An optimizer that updates any range of its group by itself.
pub(crate) trait ByRange: Keeps {
    /// Enqueues the update of a range. If the clipping factor is not finite, nothing changes.
    fn update(&self, on: &UpdateQueue, update: Update) -> Result;
}

/// An optimizer that updates a matrix as a whole, in three steps. The first and the last may run on ranges of the
/// matrix, wherever they are. The middle one needs the whole matrix in one place.
pub(crate) trait ByMatrix: Keeps {
    /// The type of directions.
    fn dtype(&self) -> DType;

    /// Bytes of scratch that [`ByMatrix::transform`] needs for a matrix of this shape.
    fn scratch_bytes(&self, shape: [usize; 2]) -> usize;

    /// Enqueues the update of the moments and the direction of a range, `out [n]`. Takes the moments out of `update`.
    fn direct(&self, on: &UpdateQueue, update: &mut Update, out: Out) -> Result;

    /// Enqueues the transformation of a whole direction, in place, into what weights move along. `rates` are those of
    /// the step.
    fn transform(
        &self,
        on: &UpdateQueue,
        shape: [usize; 2],
        direction: Out,
        scratch: Out,
        rates: In,
    ) -> Result;

    /// Enqueues the update of a range's weights. If the clipping factor is not finite, they stay as they are.
    fn apply(
        &self,
        on: &UpdateQueue,
        update: Update,
        matrix: &WholeTensor,
        direction: In,
    ) -> Result;
}

/// f64 sums over a tensor, to which every range of it adds its own.
pub(crate) enum Sums {
    /// This many sums, which are exact in any order.
    Exact(usize),
    /// This many sums for each block of [`kernels::quantise::BLOCK`] elements of the tensor. No range divides a block.
    OfBlocks(usize),
}

/// What the update of a tensor by sums reads and writes, besides its ranges.
pub(crate) struct Summed<'a> {
    pub(crate) tensor: &'a WholeTensor,
    /// In the order of [`Keeps::tensor_states`].
    pub(crate) states: Vec<Out<'a>>,
    /// [`BySums::scratch_bytes`] of u8, which keep their contents over all sweeps.
    pub(crate) scratch: Out<'a>,
    /// f64: sums of squares of the tensor's gradients by grains of the norm, before clipping.
    pub(crate) norm_grains: In<'a>,
    /// As in [`Update`].
    pub(crate) rates: In<'a>,
    /// As in [`Update`].
    pub(crate) clip: In<'a>,
}

/// An optimizer whose update of a tensor depends on sums over all of it. A sweep goes over all ranges, wherever they
/// are, and computes some of the sums. The next sweep may use them.
pub(crate) trait BySums: Keeps {
    /// The sums of each sweep.
    fn sweeps(&self, tensor: &WholeTensor) -> Vec<Sums>;

    /// Bytes of scratch for a tensor, besides its sums.
    fn scratch_bytes(&self, tensor: &WholeTensor) -> usize;

    /// Prepares the first sweep.
    fn begin(&self, on: &UpdateQueue, summed: &mut Summed) -> Result;

    /// Enqueues the sums (f64) of a range that begins at this element of the tensor: all exact sums, or those of each
    /// of its blocks.
    fn sum(
        &self,
        on: &UpdateQueue,
        sweep: usize,
        summed: &mut Summed,
        range: (usize, Update),
        sums: Vec<Out>,
    ) -> Result;

    /// Ends a sweep, given all sums. Exact sums have one row per range; sums of blocks have one row per sum.
    fn end_sweep(&self, on: &UpdateQueue, sweep: usize, summed: &mut Summed, sums: In) -> Result;

    /// Enqueues the update of a range. If the clipping factor is not finite, it stays as it is.
    fn apply(&self, on: &UpdateQueue, summed: &mut Summed, range: (usize, Update)) -> Result;
}

/// An optimizer. Each has its own file, and a line in [`crate::OptimizerKind`].
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

/// A tensor that is updated as a whole: a matrix, several of one shape, or a vector, which counts as one row.
#[derive(Clone, Debug, PartialEq)]
pub struct WholeTensor {
    /// Its index in the layout.
    pub entry: usize,
    /// The number of matrices.
    pub count: usize,
    /// The shape of each matrix in the layout.
    pub shape: [usize; 2],
    /// The shape that optimizers use, as files have it: the same or transposed.
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

/// Parameters that one rule updates.
pub(crate) struct ParameterGroup {
    pub(crate) rule: Rule,
    pub(crate) cover: Cover,
    /// The tensors of the cover, padding included, if the rule updates tensors as a whole.
    pub(crate) tensors: Vec<WholeTensor>,
}

/// What the update of a range reads and writes, on the device.
pub(crate) struct Update<'a> {
    /// `[n]` f32 or bf16.
    pub(crate) weights: Out<'a>,
    /// The master state of the weights.
    pub(crate) master: MasterOperand<'a>,
    /// The states, in the order of [`Keeps::moments`].
    pub(crate) moments: Vec<MomentOperand<'a>>,
    /// `[n]` f32 or bf16, before clipping.
    pub(crate) gradients: In<'a>,
    /// f32: [`Keeps::rates`].
    pub(crate) rates: In<'a>,
    /// `[2]` f32: the norm of all gradients, and the clipping factor.
    pub(crate) clip: In<'a>,
    /// `[2]` u32: the key of the step's random numbers.
    pub(crate) key: In<'a>,
    /// The number of the range's first element for random numbers.
    pub(crate) first_index: u64,
    /// Decoupled weight decay of these parameters.
    pub(crate) weight_decay: f32,
}

/// The kernels and the queue that an update's operations go to.
pub(crate) struct UpdateQueue<'a> {
    kernels: &'a Kernels,
    queue: Queue,
}

impl<'a> UpdateQueue<'a> {
    /// Enqueues in `queue`.
    ///
    /// # Safety
    /// The caller keeps the promise of [`kernels::Kernels::start`] for every operation.
    pub(crate) unsafe fn new(kernels: &'a Kernels, queue: Queue) -> UpdateQueue<'a> {
        UpdateQueue { kernels, queue }
    }

    /// Enqueues in the queue of the computation.
    pub(crate) fn in_computation(kernels: &'a Kernels) -> UpdateQueue<'a> {
        // SAFETY: that queue asks for no promise.
        unsafe { UpdateQueue::new(kernels, Queue::Compute) }
    }

    /// Enqueues an operation.
    pub(crate) fn run<'b>(&self, operation: impl Into<Operation<'b>>) -> Result {
        // SAFETY: the caller of `new` promised it.
        unsafe { self.kernels.start(self.queue, operation) }
    }

    /// Enqueues an exchange, in the order of this queue.
    pub(crate) fn exchange<'b>(
        &self,
        bytes: ExchangeBytes,
        list: impl FnOnce() -> Exchange<'b> + 'b,
    ) -> Result {
        let (kernels, queue) = (self.kernels, self.queue);
        kernels.wait(Queue::Collective, kernels.record(queue)?, COMPLETE)?;
        // SAFETY: only this queue reads and writes the pieces. It waits for them, and their memory lives long enough.
        unsafe { kernels.start_exchange_of(bytes, Box::new(list)) }?;
        kernels.wait(queue, kernels.record(Queue::Collective)?, CAME)
    }
}
