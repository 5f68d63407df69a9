//! The update of a range: its operands, and the queue that its operations go to.

use kernels::{
    Exchange, ExchangeBytes, Kernels, MasterOperand, MomentOperand, Operation, Queue, Result,
};
use memory::{Entry, In, Out};

const COMPLETE: &str = "what a rank has of a tensor is complete before it is sent";
const CAME: &str = "what other ranks have of a tensor has come before it is used";

/// The numbers of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
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

/// The operands of the update of a range, on the device.
pub(crate) struct Update<'a> {
    /// `[n]` f32 or bf16.
    pub(crate) weights: Out<'a>,
    /// The master state of the weights.
    pub(crate) master: MasterOperand<'a>,
    /// The states with one element per parameter or per block, in the order of the rule's moments.
    pub(crate) moments: Vec<MomentOperand<'a>>,
    /// The f32 states that the range's tensor has as a whole.
    pub(crate) tensor_states: Vec<Out<'a>>,
    /// `[n]` f32 or bf16, before clipping.
    pub(crate) gradients: In<'a>,
    /// f32: the rule's numbers of the step.
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
