//! Sums over the rows of a matrix, column by column: parts of the rows in the constant workspace, then their sum.

use super::extent::Extent;
use super::{Argument, Cuda, Driver, Kernel, accumulates, kernel, no_kernel};
use crate::{Init, KernelError};
use memory::{DType, Out};

/// How the rows of a matrix are parted.
pub(super) struct Parting {
    /// Rows of a part, at least.
    pub(super) rows_min: usize,
    /// The rows of a part are a multiple of this.
    pub(super) rows_multiple: usize,
    /// Parts, at most.
    pub(super) parts_max: usize,
}

/// Parts of the rows of a matrix, and where their sums go: into matrices of a row a part, in the workspace of the products.
pub(super) struct Parts {
    rows: usize,
    width: usize,
    part_rows: usize,
}

impl Parts {
    /// Parts by the matrix's shape, and by how many fit the workspace where each has `sums` rows of sums.
    pub(super) fn new<D: Driver>(
        cuda: &Cuda<D>,
        operation: &'static str,
        [rows, width]: [usize; 2],
        sums: usize,
        parting: Parting,
    ) -> Result<Parts, KernelError> {
        let room = cuda.workspace.bytes() as usize / size_of::<f32>() / sums;
        if width > room {
            let message = format!("{width} columns are more than the {room} that can be summed");
            return Err(KernelError::too_large(operation, message));
        }
        let parts = parting.parts_max.min(room / width.max(1));
        let part_rows = rows.div_ceil(parts).max(parting.rows_min);
        Ok(Parts {
            rows,
            width,
            part_rows: part_rows.next_multiple_of(parting.rows_multiple),
        })
    }

    pub(super) fn count(&self) -> usize {
        self.rows.div_ceil(self.part_rows)
    }

    /// Rows of every part but the last.
    pub(super) fn part_rows(&self) -> usize {
        self.part_rows
    }

    /// Where the parts of a sum go: the first one's, or of another, which follows it.
    pub(super) fn place<D: Driver>(&self, cuda: &Cuda<D>, sum: usize) -> Argument {
        let elements = self.count() * self.width;
        let place = sum * elements..(sum + 1) * elements;
        (&cuda.workspace.view().rows(place)).into()
    }

    /// Sets `out`, or adds to it, the parts of a sum.
    pub(super) fn add<D: Driver>(
        &self,
        cuda: &Cuda<D>,
        sum: usize,
        (out, init): (Out, Init),
    ) -> Result<(), KernelError> {
        let arguments = [
            (&out).into(),
            self.place(cuda, sum),
            self.count().into(),
            self.width.into(),
            accumulates(&init),
        ];
        let kernel = kernel!("columns", "add_parts", out.dtype());
        let extent = Extent::columns(self.count(), self.width, 1);
        cuda.launch(kernel, extent, &arguments)
    }
}
