//! Sums over the rows of a matrix, column by column: parts of the rows in the constant workspace, then their sum.

use super::extent::Extent;
use super::{Argument, Cuda, Driver, Kernel, accumulates, kernel, no_kernel};
use crate::{Init, KernelError};
use memory::{DType, Out};

/// Rows of a part, at least, and parts at most: enough blocks for every multiprocessor, however narrow the matrix.
const PART_ROWS_MIN: usize = 256;
const PARTS_MAX: usize = 256;

/// A matrix whose rows are summed.
pub(super) struct Columns {
    rows: usize,
    width: usize,
    part_rows: usize,
}

impl Columns {
    /// How a matrix is parted: by its shape, and by how many parts fit the workspace.
    pub(super) fn new<D: Driver>(
        cuda: &Cuda<D>,
        operation: &'static str,
        rows: usize,
        width: usize,
    ) -> Result<Columns, KernelError> {
        let room = cuda.workspace.bytes() as usize / size_of::<f32>();
        if width > room {
            let message = format!("{width} columns are more than the {room} that can be summed");
            return Err(KernelError::too_large(operation, message));
        }
        let parts = PARTS_MAX.min(room / width.max(1));
        Ok(Columns {
            rows,
            width,
            part_rows: rows.div_ceil(parts).max(PART_ROWS_MIN),
        })
    }

    fn parts(&self) -> usize {
        self.rows.div_ceil(self.part_rows).max(1)
    }

    /// Where the parts go: the first argument of the kernel that makes them.
    pub(super) fn place<D: Driver>(cuda: &Cuda<D>) -> Argument {
        (&cuda.workspace.view()).into()
    }

    /// The last arguments of the kernel that makes the parts.
    pub(super) fn sizes(&self) -> [Argument; 3] {
        [self.rows.into(), self.part_rows.into(), self.width.into()]
    }

    /// Makes the parts by `kernel`, and sets or adds their sum.
    pub(super) fn sum<D: Driver>(
        &self,
        cuda: &Cuda<D>,
        kernel: Kernel,
        arguments: &[Argument],
        (out, init): (Out, Init),
    ) -> Result<(), KernelError> {
        let extent = Extent::columns(self.part_rows.min(self.rows), self.width, self.parts());
        cuda.launch(kernel, extent, arguments)?;
        let arguments = [
            (&out).into(),
            Columns::place(cuda),
            self.parts().into(),
            self.width.into(),
            accumulates(&init),
        ];
        let kernel = kernel!("columns", "add_parts", out.dtype());
        cuda.launch(kernel, Extent::flat(self.width), &arguments)
    }
}
