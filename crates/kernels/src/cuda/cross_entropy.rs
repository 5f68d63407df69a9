//! Cross-entropy with its gradient in place of the logits.

use super::extent::Extent;
use super::{Cuda, Driver, Kernel, kernel, no_kernel};
use crate::{KernelError, check};
use memory::{DType, In, Out};

pub(super) fn cross_entropy<D: Driver>(
    cuda: &Cuda<D>,
    losses: Out,
    logits: Out,
    targets: In,
    scale: f32,
) -> Result<(), KernelError> {
    check::cross_entropy(&losses, &logits, &targets)?;
    let kernel = kernel!("cross_entropy", "cross_entropy", logits.dtype());
    let (tokens, vocabulary) = (logits.dims()[0], logits.dims()[1]);
    let arguments = [
        (&losses).into(),
        (&logits).into(),
        (&targets).into(),
        vocabulary.into(),
        scale.into(),
    ];
    cuda.launch(kernel, Extent::rows(tokens, vocabulary), &arguments)
}
