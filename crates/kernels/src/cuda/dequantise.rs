//! Matrices that are stored as codes become matrices of plain numbers.

use super::extent::Extent;
use super::{Cuda, Driver, arguments, kernel};
use crate::Result;
use crate::operation::{DequantiseBytes, DequantiseMxfp4, DequantiseNf4};

/// Packs of bytes that a thread takes: as in `dequantise.cu`.
const ROUNDS: usize = 4;

pub(super) fn dequantise_bytes<D: Driver>(cuda: &Cuda<D>, op: DequantiseBytes) -> Result {
    let kernel = kernel!("dequantise", "dequantise_bytes", op.out.dtype());
    let n = op.out.elements();
    let arguments = arguments![&op.out, &op.codes, &op.absmax, n];
    cuda.launch(kernel, Extent::flat(n), &arguments)
}

pub(super) fn dequantise_nf4<D: Driver>(cuda: &Cuda<D>, op: DequantiseNf4) -> Result {
    let kernel = kernel!("dequantise", "dequantise_nf4", op.out.dtype());
    let n = op.out.elements();
    let arguments = arguments! { &op.out, &op.codes, &op.absmax_codes, &op.absmax, &op.offset, n };
    let packs = op.codes.elements().div_ceil(ROUNDS);
    cuda.launch(kernel, Extent::flat(packs), &arguments)
}

pub(super) fn dequantise_mxfp4<D: Driver>(cuda: &Cuda<D>, op: DequantiseMxfp4) -> Result {
    let kernel = kernel!("dequantise", "dequantise_mxfp4", op.out.dtype());
    let n = op.out.elements();
    let arguments = arguments![&op.out, &op.codes, &op.exponents, n];
    cuda.launch(kernel, Extent::flat(op.codes.elements()), &arguments)
}
