//! How a matrix lies in memory.

use crate::device::{Device, Tensor as OnDevice};
use crate::host::Host;
use candle_core::{Result, Tensor};
use memory::{DType, In, Out};

/// A matrix as a view of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layout {
    pub transposed: bool,
    /// Columns on either side that are not part of it.
    pub margin: usize,
}

pub const PLAIN: Layout = Layout {
    transposed: false,
    margin: 0,
};
pub const TRANSPOSED: Layout = Layout {
    transposed: true,
    margin: 0,
};
pub const COLUMNS: Layout = Layout {
    transposed: false,
    margin: 3,
};
/// Columns that begin and end at whole packs of a CUDA kernel's.
pub const WIDE_COLUMNS: Layout = Layout {
    transposed: false,
    margin: 8,
};
pub const TRANSPOSED_COLUMNS: Layout = Layout {
    transposed: true,
    margin: 3,
};

impl Layout {
    /// The tensor that a matrix is a view of; NaN beyond it.
    pub fn stored(self, dtype: DType, [rows, columns]: [usize; 2], seed: u64) -> Host {
        let [rows, columns] = if self.transposed {
            [columns, rows]
        } else {
            [rows, columns]
        };
        self.around(&Host::random(dtype, [rows, columns], 1.0, seed))
    }

    /// A tensor of these values, of which the matrix is some columns; NaN beyond it.
    pub fn around(self, inner: &Host) -> Host {
        let &[rows, columns] = inner.dims.as_slice() else {
            panic!(
                "{:?} has other dimensions than rows and columns",
                inner.dims
            );
        };
        let nan = || std::iter::repeat_n(f64::NAN, self.margin);
        let values = inner.values();
        let values = values
            .chunks(columns)
            .flat_map(|row| nan().chain(row.iter().copied()).chain(nan()));
        Host::new(inner.dtype, [rows, columns + 2 * self.margin], values)
    }

    /// The matrix within such a tensor, to be written.
    pub fn view_mut(self, x: Out) -> Out {
        let columns = x.dims()[1];
        x.columns(self.margin..columns - self.margin)
    }

    /// The values of the matrix within such a tensor; all that lies there where nothing is computed.
    pub fn take(self, device: &Device, x: &OnDevice) -> Host {
        let x = device.take(x);
        match device.memory.is_shapes() {
            true => x,
            false => self.within(&x),
        }
    }

    /// The values of the matrix within such a tensor.
    ///
    /// # Panics
    /// If something was written beyond it.
    fn within(self, x: &Host) -> Host {
        let &[rows, columns] = x.dims.as_slice() else {
            panic!("{:?} has other dimensions than rows and columns", x.dims);
        };
        let inner = self.margin..columns - self.margin;
        let mut values = Vec::new();
        for row in x.values().chunks(columns) {
            values.extend(&row[inner.clone()]);
            let mut beyond = row[..inner.start].iter().chain(&row[inner.end..]);
            assert!(
                beyond.all(|value| value.is_nan()),
                "columns beyond the matrix were written"
            );
        }
        Host::new(x.dtype, [rows, inner.len()], values)
    }

    pub fn view(self, x: In) -> In {
        let columns = x.dims()[1];
        let inner = x.t().rows(self.margin..columns - self.margin);
        if self.transposed { inner } else { inner.t() }
    }

    pub fn view_of_oracle(self, x: &Tensor) -> Result<Tensor> {
        let inner = x.narrow(1, self.margin, x.dim(1)? - 2 * self.margin)?;
        if self.transposed {
            inner.t()?.contiguous()
        } else {
            inner.contiguous()
        }
    }
}
