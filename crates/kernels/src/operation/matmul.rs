//! Products of matrices.

use super::Init;
use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::operation;
use memory::{In, Out};

operation! {
    /// `out [m, n] = init + a [m, k] b [k, n] + bias [n]`, with the bias, if there is one, added to every row. `a` and `b`
    /// may be strided (`.t()`), and rows of `out` may have gaps between them (`.columns()`). Types may differ, except that
    /// the bias has the type of `out`. The sum is f32 and is rounded once, when it is stored into `out`. If a device has no
    /// such product, it is rounded before the bias is added.
    Matmul "matmul": a [m, k], b [_, n] {
        out: Out<'a> [m, n] by_rows plus(init),
        a: In<'a> [m, k] real strided,
        b: In<'a> [k, n] real strided,
        bias: Option<In<'a>> [n],
        init: Init<'a> [m, n],
    }

    /// `out [n, n] = x [n, k] x'`, the products of the rows of `x` with one another. Both are f32 or bf16, of types that
    /// may differ; sums are f32 and rounded once. `x` may be strided (`.t()`). The CPU computes the part on and below the
    /// diagonal and copies the rest, so the result is symmetric to the bit. CUDA computes all of it by cuBLASLt, so its
    /// halves may differ by roundings.
    Gram "gram": x [n, k] {
        out: Out<'a> [n, n] real,
        x: In<'a> [n, k] real strided,
    }
}

impl Contract for Matmul<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        check.product_of(&[self.out.dtype(), self.a.dtype(), self.b.dtype()])
    }

    fn multiplications(&self) -> usize {
        self.sizes().iter().product()
    }

    /// m, k, n.
    fn sizes(&self) -> Vec<usize> {
        vec![self.a.dims()[0], self.a.dims()[1], self.b.dims()[1]]
    }
}

impl Contract for Gram<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        check.product_of(&[self.out.dtype(), self.x.dtype()])
    }

    /// Counts the entries on and below the diagonal, even on devices that compute all of them.
    fn multiplications(&self) -> usize {
        let [rows, inner] = [0, 1].map(|axis| self.x.dims()[axis]);
        rows * (rows + 1) / 2 * inner
    }

    /// n, k, n.
    fn sizes(&self) -> Vec<usize> {
        let [rows, inner] = [0, 1].map(|axis| self.x.dims()[axis]);
        vec![rows, inner, rows]
    }
}
