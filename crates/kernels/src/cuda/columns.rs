//! Sums over the rows of a matrix, column by column. Parts of the rows are summed in the constant workspace, then their
//! sums are added.

use super::extent::Extent;
use super::{Argument, Cuda, Driver, accumulates, arguments, kernel};
use crate::operation::{ByColumns, HasShape};
use crate::{Init, KernelError, Result};
use memory::Out;
use std::ops::Range;

/// How the rows of a matrix are divided into parts.
pub(super) struct Parting {
    /// Fewest rows of a part.
    pub(super) rows_min: usize,
    /// The rows of a part are a multiple of this.
    pub(super) rows_multiple: usize,
    /// Most parts.
    pub(super) parts_max: usize,
}

/// The parts of a matrix's rows, and where their sums go: matrices with one row per part, in the workspace of products.
pub(super) struct Parts {
    rows: usize,
    width: usize,
    part_rows: usize,
}

impl Parts {
    /// Chooses parts by the matrix's shape, and by how many fit the workspace if each has `sums` rows of sums.
    pub(super) fn new<D: Driver>(
        cuda: &Cuda<D>,
        operation: &'static str,
        [rows, width]: [usize; 2],
        sums: usize,
        parting: Parting,
    ) -> Result<Parts> {
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

    /// Rows of every part except the last.
    pub(super) fn part_rows(&self) -> usize {
        self.part_rows
    }

    /// Where the parts of the `sum`-th sum go. Sums follow one another.
    pub(super) fn place<D: Driver>(&self, cuda: &Cuda<D>, sum: usize) -> Argument {
        let elements = self.count() * self.width;
        let place = sum * elements..(sum + 1) * elements;
        Argument::from(&cuda.workspace.view().rows(place))
    }

    /// Adds up the parts of a sum, into `out` or onto it.
    pub(super) fn add<D: Driver>(
        &self,
        cuda: &Cuda<D>,
        sum: usize,
        (out, init): (ByColumns<Out>, Init),
    ) -> Result {
        let (parts, width) = (self.count(), self.width);
        let ([first, second, third], [_, seconds, thirds]) = places(&out);
        let arguments = arguments! {
            first, second, third, seconds.start, thirds.start, self.place(cuda, sum), parts, width,
            accumulates(&init),
        };
        let kernel = kernel!("columns", "add_parts", out.first.dtype());
        let extent = Extent::columns(parts, width, 1);
        cuda.launch(kernel, extent, &arguments)
    }
}

/// Where up to three vectors lie, and the columns of each. A vector that is not given is nowhere, behind the others.
pub(super) fn places<'v, T: HasShape>(
    vectors: &'v ByColumns<T>,
) -> ([Argument; 3], [Range<usize>; 3])
where
    Argument: From<&'v T>,
{
    let mut places = [Argument::NULL; 3];
    for (place, vector) in places.iter_mut().zip(vectors.iter()) {
        *place = Argument::from(vector);
    }
    (places, vectors.columns())
}
