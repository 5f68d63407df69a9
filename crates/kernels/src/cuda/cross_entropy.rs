//! Cross-entropy with its gradient in place of the logits.

use super::extent::Extent;
use super::{Cuda, Driver, arguments, kernel};
use crate::Result;
use crate::operation::CrossEntropy;

pub(super) fn cross_entropy<D: Driver>(cuda: &Cuda<D>, op: CrossEntropy) -> Result {
    let kernel = kernel!("cross_entropy", "cross_entropy", op.logits.dtype());
    let (tokens, vocabulary) = (op.logits.dims()[0], op.logits.dims()[1]);
    let arguments = arguments![&op.losses, &op.logits, &op.targets, vocabulary, &op.scale];
    cuda.launch(kernel, Extent::rows(tokens, vocabulary), &arguments)
}
