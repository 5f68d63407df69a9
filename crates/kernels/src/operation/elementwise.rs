//! Values, copies and biases.

use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::operation;
use super::{ByColumns, Init};
use memory::{In, Out};

operation! {
    /// Sets every element of `out`, of any shape.
    Fill "fill": out {
        out: Out<'a> [..out] real,
        value: f32,
    }

    /// Copies between tensors of one shape, converting between f32 and bf16. Rows of matrices may have gaps between them
    /// (`.columns()`).
    Copy "copy": out {
        out: Out<'a> [..x] real by_rows,
        x: In<'a> [..x] real by_rows,
    }

    /// `out [t, n] += bias [n]` on every row. There may be gaps between rows (`.columns()`). The bias may be several vectors.
    AddBias "add_bias": out [t, n] {
        out: Out<'a> [t, n] by_rows changes,
        bias: ByColumns<In<'a>> [n],
    }

    /// `out [n] = init + sum of the rows of dy [t, n]`, which may have gaps between them (`.columns()`). A gradient: f32 or
    /// bf16, summed in f32 and rounded once. It may be several vectors.
    BiasBackward "bias_backward": dy [t, n] {
        out: ByColumns<Out<'a>> [n] real plus(init),
        dy: In<'a> [t, n] real by_rows,
        init: Init<'a> [] in_place,
    }
}

impl Contract for Fill<'_> {}

impl Contract for Copy<'_> {}

impl Contract for AddBias<'_> {}

impl Contract for BiasBackward<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let dtype = self.out.first.dtype();
        check.that(self.out.iter().all(|out| out.dtype() == dtype), || {
            "vectors of `out` hold different types".into()
        })
    }
}
