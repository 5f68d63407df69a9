//! Cross-entropy with its gradient in place of the logits.

use super::extent::Extent;
use super::{Argument, Cuda, Driver, Kernel, kernel, no_kernel};
use crate::KernelError;
use crate::operation::CrossEntropy;
use memory::DType;

pub(super) fn cross_entropy<D: Driver>(
    cuda: &Cuda<D>,
    operation: CrossEntropy,
) -> Result<(), KernelError> {
    let CrossEntropy {
        losses,
        logits,
        targets,
        scale,
    } = operation;
    let kernel = kernel!("cross_entropy", "cross_entropy", logits.dtype());
    let (tokens, vocabulary) = (logits.dims()[0], logits.dims()[1]);
    let arguments = [
        (&losses).into(),
        (&logits).into(),
        (&targets).into(),
        vocabulary.into(),
        scale.as_ref().map_or(Argument::NULL, Argument::from),
    ];
    cuda.launch(kernel, Extent::rows(tokens, vocabulary), &arguments)
}
