//! Dropout (Srivastava et al. 2014), alone and between a bias and a residual.

use super::extent::Extent;
use super::{Argument, Cuda, Driver, arguments, kernel};
use crate::operation::{BiasDropoutAdd, DropoutScale};
use crate::{Dropout, Result};

/// Threshold, key and scale, as kernels take them. Without dropout the threshold is 0, and no random number is below
/// it.
pub(super) fn dropout_arguments(dropout: Option<Dropout>) -> [Argument; 3] {
    let Some(dropout) = dropout else {
        return arguments![0, Argument::NULL, 1.0];
    };
    arguments![dropout.threshold() as usize, &dropout.key, dropout.scale()]
}

pub(super) fn bias_dropout_add<D: Driver>(cuda: &Cuda<D>, op: BiasDropoutAdd) -> Result {
    let kernel = kernel!("dropout", "bias_dropout_add", op.out.dtype());
    let (rows, width) = (op.out.dims()[0], op.out.dims()[1]);
    let [threshold, key, kept_scale] = dropout_arguments(op.dropout);
    let arguments = arguments! {
        &op.out, &op.bias, &op.residual, width, op.first, threshold, key, kept_scale, op.scale,
    };
    cuda.launch(kernel, Extent::rows(rows, width), &arguments)
}

pub(super) fn dropout_scale<D: Driver>(cuda: &Cuda<D>, op: DropoutScale) -> Result {
    let kernel = kernel!("dropout", "dropout_scale", op.out.dtype());
    let n = op.out.elements();
    let [threshold, key, kept_scale] = dropout_arguments(op.dropout);
    let arguments = arguments! {
        &op.out, &op.x, n, op.first, threshold, key, kept_scale, op.scale,
    };
    cuda.launch(kernel, Extent::flat(n), &arguments)
}
