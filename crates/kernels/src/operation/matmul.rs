//! Products of matrices.

use super::Init;
use super::check::{Check, Checked, View};
use super::contract::{Contract, Operand, reads, sets};
use memory::{DType, In, Out};

/// `out [m, n] = init + a [m, k] b [k, n] + bias [n]` on every row, where there is one. `a` and `b` may be strided (`.t()`),
/// rows of `out` apart (`.columns()`); types may differ, but for the bias, which has that of `out`: the sum is f32 and is
/// rounded once, on its way into `out`. Where a device has no such product, it is rounded before the bias is added.
pub struct Matmul<'a> {
    pub out: Out<'a>,
    pub a: In<'a>,
    pub b: In<'a>,
    pub bias: Option<In<'a>>,
    pub init: Init<'a>,
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
        let all_f32 = [out.dtype(), a.dtype(), b.dtype()] == [DType::F32; 3];
        check.that(check.widens || all_f32, || {
            "these kernels were made for f32 and have no workspace to widen bf16 in".into()
        })?;
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
