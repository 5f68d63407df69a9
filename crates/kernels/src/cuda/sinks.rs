//! The gradient of attention's sinks.

use super::extent::Extent;
use super::{Cuda, Driver, accumulates, arguments, kernel};
use crate::{AttentionShape, Init, Result};
use memory::{In, Out};

/// Threads of a block, which has a head.
const THREADS: usize = 256;

/// `dsinks [heads] = init` - the sums of e^(sink - lse) times `row_sums` over all rows of a head. `lse` and `row_sums`, those of
/// `dout * out`, are `[b, heads, s]`.
pub(super) fn sink_gradient<D: Driver>(
    cuda: &Cuda<D>,
    (dsinks, init): (&Out, &Init),
    [sinks, lse, row_sums]: [&In; 3],
    shape: AttentionShape,
) -> Result {
    let kernel = kernel!("sinks", "sink_gradient", dsinks.dtype(), sinks.dtype());
    let arguments = arguments! {
        dsinks, sinks, lse, row_sums, shape.batch, shape.seq, accumulates(init),
    };
    let extent = Extent::new([shape.heads, 1, 1], [THREADS, 1, 1]);
    cuda.launch(kernel, extent, &arguments)
}
