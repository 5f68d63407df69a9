//! The short causal convolution in front of the gated delta rule.

use super::columns::{Parting, Parts};
use super::extent::Extent;
use super::{Argument, Cuda, Driver, arguments, int, kernel};
use crate::Result;
use crate::operation::{ShortConvolution, ShortConvolutionBackward};
use memory::{In, Out};

/// Threads of a block.
pub(super) const THREADS: usize = 256;

/// Fewest rows of a part of a weight's gradient, and most parts.
pub(super) const PARTING: Parting = Parting {
    rows_min: 64,
    rows_multiple: 1,
    parts_max: 256,
};

/// The arguments that all kernels of a convolution share: input, weight, documents and sizes.
fn convolution(x: &In, weight: &In, seq: usize, documents: &Option<In>) -> [Argument; 7] {
    let [columns, taps] = [0, 1].map(|dim| weight.dims()[dim]);
    arguments![
        x,
        x.strides()[0],
        weight,
        documents,
        seq,
        columns,
        int(taps)
    ]
}

fn columns_of_tokens(tokens: usize, columns: usize) -> Extent {
    Extent::new([tokens, columns.div_ceil(THREADS), 1], [THREADS, 1, 1])
}

pub(super) fn short_convolution<D: Driver>(cuda: &Cuda<D>, op: ShortConvolution) -> Result {
    let &[tokens, columns] = op.out.dims() else {
        unreachable!("the check asks for two dimensions")
    };
    let of = convolution(&op.x, &op.weight, op.seq, &op.documents);
    let kernel = kernel!("short_convolution", "short_convolution", op.x.dtype());
    let extent = columns_of_tokens(tokens, columns);
    cuda.launch(kernel, extent, &[&arguments![&op.out][..], &of].concat())
}

pub(super) fn short_convolution_backward<D: Driver>(
    cuda: &Cuda<D>,
    op: ShortConvolutionBackward,
) -> Result {
    let (tokens, [columns, taps]) = (op.dout.dims()[0], [0, 1].map(|dim| op.weight.dims()[dim]));
    let of = convolution(&op.x, &op.weight, op.seq, &op.documents);
    let kernel = kernel!("short_convolution", "short_convolution_dx", op.x.dtype());
    let into = arguments![&op.dx, op.dx.strides()[0], &op.dout];
    let all = [&into[..], &of].concat();
    cuda.launch(kernel, columns_of_tokens(tokens, columns), &all)?;
    let width = columns * taps;
    let parts = Parts::new(
        cuda,
        "short_convolution_backward",
        [tokens, width],
        1,
        PARTING,
    )?;
    let kernel = kernel!(
        "short_convolution",
        "short_convolution_dweight",
        op.x.dtype()
    );
    let into = arguments![parts.place(cuda, 0), &op.dout];
    let all = [&into[..], &of, &arguments![tokens, parts.part_rows()]].concat();
    let extent = Extent::new(
        [columns.div_ceil(THREADS), parts.count(), 1],
        [THREADS, 1, 1],
    );
    cuda.launch(kernel, extent, &all)?;
    let dweight: Out = op.dweight.reshape([width]);
    parts.add(cuda, 0, (dweight.into(), op.init))
}
