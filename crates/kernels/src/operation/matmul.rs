//! Products of matrices.

use super::Init;
use super::check::{Check, Checked, View};
use super::contract::{Contract, Operand, reads, sets, writes};
use memory::{DType, In, Out};

/// `out [m, n] = init + a [m, k] b [k, n] + bias [n]`, with the bias, if there is one, added to every row. `a` and `b`
/// may be strided (`.t()`), and rows of `out` may have gaps between them (`.columns()`). Types may differ, except that
/// the bias has the type of `out`. The sum is f32 and is rounded once, when it is stored into `out`. If a device has no
/// such product, it is rounded before the bias is added.
pub struct Matmul<'a> {
    pub out: Out<'a>,
    pub a: In<'a>,
    pub b: In<'a>,
    pub bias: Option<In<'a>>,
    pub init: Init<'a>,
}

/// `out [n, n] = x [n, k] x'`, the products of the rows of `x` with one another. Both are f32 or bf16, of types that
/// may differ; sums are f32 and rounded once. `x` may be strided (`.t()`). The CPU computes the part on and below the
/// diagonal and copies the rest, so the result is symmetric to the bit. CUDA computes all of it by cuBLASLt, so its
/// halves may differ by roundings.
pub struct Gram<'a> {
    pub out: Out<'a>,
    pub x: In<'a>,
}

/// Refuses bf16 if there is no workspace to pack it in.
pub(super) fn check_types(check: &Check, dtypes: &[DType]) -> Checked {
    let all_f32 = dtypes.iter().all(|dtype| *dtype == DType::F32);
    check.that(check.widens || all_f32, || {
        "these kernels were made for f32 and have no workspace to widen bf16 in".into()
    })
}

impl Contract for Matmul<'_> {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn check(&self, check: &Check) -> Checked {
        let Matmul {
            out,
            a,
            b,
            bias,
            init,
        } = self;
        for (name, x) in [("out", out as &dyn View), ("a", a), ("b", b)] {
            check.rank(name, x, 2)?;
            check.real_type(name, x)?;
        }
        check.that(a.dims()[1] == b.dims()[0], || {
            let (a, b) = (a.dims(), b.dims());
            format!("`a` is {a:?} and `b` {b:?}: inner sizes differ")
        })?;
        check.real_by_rows("out", out, &[a.dims()[0], b.dims()[1]])?;
        if let Some(bias) = bias {
            check.tensor("bias", bias, &out.dims()[1..], out.dtype())?;
        }
        check_types(check, &[out.dtype(), a.dtype(), b.dtype()])?;
        match init {
            Init::Add(x) => check.tensor("init", x, out.dims(), out.dtype()),
            Init::Overwrite | Init::Accumulate => Ok(()),
        }
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let ins = [self.a, self.b].into_iter().chain(self.bias).map(reads);
        [sets(&self.out, &self.init)]
            .into_iter()
            .chain(ins)
            .collect()
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
    fn name(&self) -> &'static str {
        "gram"
    }

    fn check(&self, check: &Check) -> Checked {
        check.rank("x", &self.x, 2)?;
        check.real_type("x", &self.x)?;
        let rows = self.x.dims()[0];
        check.real("out", &self.out, &[rows, rows])?;
        check_types(check, &[self.out.dtype(), self.x.dtype()])
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![writes(&self.out), reads(self.x)]
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
