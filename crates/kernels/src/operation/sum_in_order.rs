//! Sums over ranks in a fixed order, so that their bits do not depend on the exchange.

use super::Init;
use super::check::{Check, Checked};
use super::contract::{Contract, Operand, reads, sets};
use memory::{In, Out};

/// `out [n] = init + x [0] + x [1] + ... + x [k - 1]` for the rows of `x [k, n]`, which has `out`'s type, f32 or bf16.
/// Each row is added in f32, and the sum is rounded to that type at once. So the sum may be split anywhere: a later
/// call continues it with the same bits. Without `init` it begins with `x [0]`.
pub struct SumInOrder<'a> {
    pub out: Out<'a>,
    pub x: In<'a>,
    pub init: Init<'a>,
}

impl Contract for SumInOrder<'_> {
    fn name(&self) -> &'static str {
        "sum_in_order"
    }

    fn check(&self, check: &Check) -> Checked {
        let SumInOrder { out, x, init } = self;
        check.no_residual(init)?;
        check.real_of_rank("out", out, 1)?;
        check.rank("x", x, 2)?;
        check.that(x.dims()[0] > 0, || "`x` has no rows to add".into())?;
        check.tensor("x", x, &[x.dims()[0], out.elements()], out.dtype())
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![reads(self.x), sets(&self.out, &self.init)]
    }

    fn runs_beside(&self) -> bool {
        true
    }
}
