//! Cross-entropy with its gradient in place of the logits, and the cap of logits.

use super::extent::Extent;
use super::{Cuda, Driver, arguments, kernel};
use crate::Result;
use crate::operation::{CrossEntropy, SoftCap};

pub(super) fn cross_entropy<D: Driver>(cuda: &Cuda<D>, op: CrossEntropy) -> Result {
    let (tokens, vocabulary) = (op.logits.dims()[0], op.logits.dims()[1]);
    let (dtype, extent) = (op.logits.dtype(), Extent::rows(tokens, vocabulary));
    let has_scales = op.scale.is_some_and(|scale| scale.elements() > 1);
    let arguments = arguments! {
        &op.losses, &op.logits, &op.targets, vocabulary, &op.scale, usize::from(has_scales),
    };
    let Some(cap) = op.cap else {
        let kernel = kernel!("cross_entropy", "cross_entropy", dtype);
        return cuda.launch(kernel, extent, &arguments);
    };
    let kernel = kernel!("cross_entropy", "cross_entropy_capped", dtype);
    cuda.launch(kernel, extent, &[&arguments[..], &arguments![cap]].concat())
}

pub(super) fn soft_cap<D: Driver>(cuda: &Cuda<D>, SoftCap { x, cap }: SoftCap) -> Result {
    let (kernel, n) = (
        kernel!("cross_entropy", "soft_cap", x.dtype()),
        x.elements(),
    );
    cuda.launch(kernel, Extent::flat(n), &arguments![&x, n, cap])
}
