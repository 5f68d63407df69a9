//! The backward pass of RMS and of layer normalisation. One pass over the rows computes the input's gradient, and
//! partial sums of the weight's and the bias's gradients.

use super::columns::{Parting, Parts};
use super::extent::{Extent, PACK, ROW_THREADS_MAX, WARP};
use super::{Argument, Cuda, Driver, Kernel, accumulates, arguments};
use crate::{Init, Result};
use memory::{In, Out};

/// Fewest rows of a block, and most blocks. With these, writing and adding the partial sums costs little beside the
/// rows, and every multiprocessor has blocks.
const PART_ROWS_MIN: usize = 16;
const PARTS_MAX: usize = 1024;

/// The fewest times that a block takes its next rows, if lanes of a warp share rows and work on several at a time.
const TURNS_MIN: usize = 4;

/// Packs of a wide row that a thread holds, and most threads of a block of such rows: as in `norm_backward.cuh`.
const HELD: usize = 4;
const HELD_THREADS_MAX: usize = 256;

/// Widest rows of which each thread holds one pack, and widest of which it holds HELD.
const NARROW_MAX: usize = PACK * ROW_THREADS_MAX;
const WIDE_MAX: usize = PACK * HELD * HELD_THREADS_MAX;

/// Kernels for rows of a pack a thread, of some, and of any number.
pub(super) struct ByWidth {
    pub(super) narrow: Kernel,
    pub(super) wide: Kernel,
    pub(super) widest: Kernel,
}

/// The rows, and what is computed of them. `gradients` are the weight's and, if there is one, the bias's.
pub(super) struct NormBackward<'a, const GRADIENTS: usize> {
    pub(super) operation: &'static str,
    pub(super) kernels: ByWidth,
    pub(super) dx: (Out<'a>, Init<'a>),
    pub(super) gradients: [(Out<'a>, Init<'a>); GRADIENTS],
    pub(super) dy: In<'a>,
    pub(super) x: In<'a>,
    pub(super) weight: In<'a>,
    /// What the forward pass kept per row, in the order of the kernel's parameters.
    pub(super) statistics: &'a [In<'a>],
}

pub(super) fn norm_backward<D: Driver, const GRADIENTS: usize>(
    cuda: &Cuda<D>,
    of: NormBackward<GRADIENTS>,
) -> Result {
    let (rows, width) = (of.x.dims()[0], of.x.dims()[1]);
    let (kernel, block) = of.kernels.for_rows_of(width);
    let parting = Parting {
        rows_min: PART_ROWS_MIN.max(TURNS_MIN * block[1]),
        rows_multiple: block[1],
        parts_max: PARTS_MAX,
    };
    let parts = Parts::new(cuda, of.operation, [rows, width], GRADIENTS, parting)?;
    let extent = Extent::new([parts.count(), 1, 1], block);
    let first = arguments![&of.dx.0, parts.place(cuda, 0), &of.dy, &of.x, &of.weight];
    let statistics: Vec<Argument> = of.statistics.iter().map(Argument::from).collect();
    let last = arguments![rows, parts.part_rows(), width, accumulates(&of.dx.1)];
    cuda.launch(kernel, extent, &[&first[..], &statistics, &last].concat())?;
    for (sum, (out, init)) in of.gradients.into_iter().enumerate() {
        parts.add(cuda, sum, (out.into(), init))?;
    }
    Ok(())
}

impl ByWidth {
    /// The kernel for rows of a width, and its blocks: threads per row along x, rows at a time along y.
    fn for_rows_of(self, width: usize) -> (Kernel, [usize; 3]) {
        if width <= NARROW_MAX {
            (self.narrow, Extent::narrow_rows(1, width).block)
        } else if width <= WIDE_MAX {
            let threads = width.div_ceil(PACK * HELD).next_multiple_of(WARP);
            (self.wide, [threads, 1, 1])
        } else {
            (self.widest, Extent::rows(1, width).block)
        }
    }
}
