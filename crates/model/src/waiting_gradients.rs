//! Gradients of matrices that a backward pass leaves for later. In a pipeline another stage waits for the gradient of the input, and
//! nobody for these.

use crate::linear::weight_gradient;
use crate::{LayerActivation, Model, ModelError, ParameterId, Pass, Purpose, Training};
use kernels::Kernels;
use memory::{Buffer, Layer, Memory, Phase};
use std::ops::Range;
use std::rc::Rc;
use units::Gradients;

/// What the gradients of matrices are computed from that one micro-batch's backward pass has left for later.
#[derive(Default)]
pub struct WaitingGradients {
    /// In the order of the backward pass.
    products: Vec<WaitingProduct>,
}

/// `dW += dy^T x`.
struct WaitingProduct {
    layer: usize,
    part: usize,
    /// The weights, by their indices in the layout.
    weights: Vec<usize>,
    /// Their columns of `dy`.
    columns: Range<usize>,
    dy: Rc<Buffer>,
    x: Rc<Buffer>,
}

impl Pass<'_> {
    /// Whether the gradients of matrices of the block whose stage runs are left for later.
    pub(crate) fn gradients_wait(&self) -> bool {
        self.gradients_of_block_wait(self.running.at.layer)
    }

    pub(crate) fn gradients_of_block_wait(&self, layer: usize) -> bool {
        match &self.work.purpose {
            Purpose::Training(training) => {
                let block = &self.model.architecture().blocks()[layer];
                training.waiting.is_some() && block.gradients_can_wait()
            }
            Purpose::Inference(_) | Purpose::Reference => false,
        }
    }

    /// How many gradients that wait hold an activation.
    pub(crate) fn holders(&self, at: LayerActivation) -> usize {
        let Purpose::Training(Training {
            waiting: Some(waiting),
            ..
        }) = &self.work.purpose
        else {
            return 0;
        };
        let Some(held) = self.work.saved.get(at) else {
            return 0;
        };
        let products = waiting.products.iter().rev();
        let of_block = products.take_while(|product| product.layer == at.layer);
        of_block
            .filter(|product| Rc::ptr_eq(&product.x, held))
            .count()
    }

    /// Leaves the gradient of some weights, which lie together, for later.
    pub(crate) fn leave_gradient(
        &mut self,
        weights: &[ParameterId],
        columns: Range<usize>,
        (dy, x): (Rc<Buffer>, Rc<Buffer>),
    ) {
        let product = WaitingProduct {
            layer: self.running.at.layer,
            part: self.part(),
            weights: self.indices(weights),
            columns,
            dy,
            x,
        };
        let waiting = self.work.purpose.training().waiting.as_mut();
        let waiting = waiting.expect("a pass that leaves gradients has a place for them");
        waiting.products.push(product);
    }
}

impl Model {
    /// Computes the gradients of matrices that one micro-batch's backward pass has left. They are complete if this is the step's last
    /// micro-batch.
    ///
    /// # Errors
    /// As [`Model::forward_backward`].
    pub fn waiting_gradients(
        &self,
        (memory, kernels): (&Memory, &Kernels),
        gradients: &mut Gradients,
        waiting: WaitingGradients,
        is_last_micro_batch: bool,
    ) -> Result<(), ModelError> {
        let on = (memory, kernels);
        let made = self.add_waiting(on, gradients, waiting, is_last_micro_batch);
        if made.is_err() {
            gradients.abandon(kernels)?;
        }
        made
    }

    fn add_waiting(
        &self,
        (memory, kernels): (&Memory, &Kernels),
        gradients: &mut Gradients,
        waiting: WaitingGradients,
        is_last_micro_batch: bool,
    ) -> Result<(), ModelError> {
        let mut products = waiting.products.into_iter().peekable();
        while let Some(layer) = products.peek().map(|product| product.layer) {
            let part = Layer::Block(layer);
            let _place = memory.enter(Phase::Backward, part);
            let unit = self.unit_of_part(part);
            let unit = unit.expect("a block with matrices has a unit");
            let open = gradients.open_again(memory, kernels, unit)?;
            while let Some(product) = products.next_if(|product| product.layer == layer) {
                gradients.use_part(product.part);
                let dweight = gradients.accumulate_joined(&product.weights);
                let dweight = dweight.expect("these weights lie together");
                let dy = product.dy.view().columns(product.columns.clone());
                weight_gradient(kernels, dweight, dy, product.x.view())?;
            }
            gradients.close(kernels, open, (true, is_last_micro_batch))?;
        }
        Ok(gradients.end_micro_batch(kernels, is_last_micro_batch)?)
    }
}
