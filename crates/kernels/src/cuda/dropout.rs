//! Dropout (Srivastava et al. 2014), alone and between a bias and a residual.

use super::extent::Extent;
use super::{Argument, Cuda, Driver, Kernel, kernel, no_kernel};
use crate::operation::{BiasDropoutAdd, DropoutBackward};
use crate::{Dropout, KernelError};
use memory::{DType, In};

/// Threshold, key and scale, as kernels take them. Without dropout the threshold is 0, and no random number is below
/// it.
pub(super) fn dropout_arguments(dropout: Option<Dropout>) -> [Argument; 3] {
    let Some(dropout) = dropout else {
        return [0.into(), Argument::NULL, 1.0.into()];
    };
    [
        (dropout.threshold() as usize).into(),
        (&dropout.key).into(),
        dropout.scale().into(),
    ]
}

pub(super) fn bias_dropout_add<D: Driver>(
    cuda: &Cuda<D>,
    operation: BiasDropoutAdd,
) -> Result<(), KernelError> {
    let BiasDropoutAdd {
        out,
        bias,
        dropout,
        first,
        residual,
    } = operation;
    let kernel = kernel!("dropout", "bias_dropout_add", out.dtype());
    let (rows, width) = (out.dims()[0], out.dims()[1]);
    let optional = |x: &Option<In>| x.as_ref().map_or(Argument::NULL, Argument::from);
    let [threshold, key, scale] = dropout_arguments(dropout);
    let arguments = [
        (&out).into(),
        optional(&bias),
        optional(&residual),
        width.into(),
        first.into(),
        threshold,
        key,
        scale,
    ];
    cuda.launch(kernel, Extent::rows(rows, width), &arguments)
}

pub(super) fn dropout_backward<D: Driver>(
    cuda: &Cuda<D>,
    operation: DropoutBackward,
) -> Result<(), KernelError> {
    let DropoutBackward {
        dx,
        dy,
        dropout,
        first,
    } = operation;
    let kernel = kernel!("dropout", "dropout_backward", dx.dtype());
    let n = dx.elements();
    let [threshold, key, scale] = dropout_arguments(Some(dropout));
    let arguments = [
        (&dx).into(),
        (&dy).into(),
        n.into(),
        first.into(),
        threshold,
        key,
        scale,
    ];
    cuda.launch(kernel, Extent::flat(n), &arguments)
}
