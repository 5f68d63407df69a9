//! How a matrix lies in memory.

use crate::host::Host;
use candle_core::{Result, Tensor};
use memory::{DType, In};

/// A matrix as a view of a stored tensor.
#[derive(Clone, Copy, Debug)]
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
        let margin = self.margin;
        let inner = Host::random(dtype, [rows, columns], 1.0, seed).values();
        let nan = || std::iter::repeat_n(f64::NAN, margin);
        let values = inner
            .chunks(columns)
            .flat_map(|row| nan().chain(row.iter().copied()).chain(nan()));
        Host::new(dtype, [rows, columns + 2 * margin], values)
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
