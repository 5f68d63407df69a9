//! Matrices that are stored as codes become matrices of plain numbers.

use super::extent::Extent;
use super::{Cuda, Driver, Kernel, kernel, no_kernel};
use crate::KernelError;
use crate::operation::{DequantiseBytes, DequantiseNf4};
use memory::DType;

pub(super) fn dequantise_bytes<D: Driver>(
    cuda: &Cuda<D>,
    DequantiseBytes { out, codes, absmax }: DequantiseBytes,
) -> Result<(), KernelError> {
    let kernel = kernel!("dequantise", "dequantise_bytes", out.dtype());
    let n = out.elements();
    let arguments = [(&out).into(), (&codes).into(), (&absmax).into(), n.into()];
    cuda.launch(kernel, Extent::flat(n), &arguments)
}

pub(super) fn dequantise_nf4<D: Driver>(
    cuda: &Cuda<D>,
    operation: DequantiseNf4,
) -> Result<(), KernelError> {
    let DequantiseNf4 {
        out,
        codes,
        absmax_codes,
        absmax,
        offset,
    } = operation;
    let kernel = kernel!("dequantise", "dequantise_nf4", out.dtype());
    let n = out.elements();
    let arguments = [
        (&out).into(),
        (&codes).into(),
        (&absmax_codes).into(),
        (&absmax).into(),
        (&offset).into(),
        n.into(),
    ];
    // A thread takes a pack of bytes, which are two packs of elements.
    cuda.launch(kernel, Extent::flat(codes.elements()), &arguments)
}
