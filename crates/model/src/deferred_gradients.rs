//! Gradients of matrices that a backward pass defers. In a pipeline another stage waits for the gradient of a pass's input, and nobody
//! for these.

use memory::Buffer;
use std::ops::Range;
use std::rc::Rc;

/// The inputs and output gradients that one micro-batch's backward pass keeps, from which the gradients of matrices are computed.
#[derive(Default)]
pub struct DeferredGradients {
    /// In the order of the backward pass.
    pub(crate) products: Vec<DeferredProduct>,
}

/// `dW += dy^T x`.
pub(crate) struct DeferredProduct {
    pub(crate) layer: usize,
    /// The weights, by their indices in the layout.
    pub(crate) weights: Vec<usize>,
    /// Their columns of `dy`.
    pub(crate) columns: Range<usize>,
    pub(crate) dy: Rc<Buffer>,
    pub(crate) x: Rc<Buffer>,
}
