//! Sums over ranks in a fixed order, so that their bits do not depend on the exchange.

use super::Init;
use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::operation;
use memory::{In, Out};

operation! {
    /// `out [n] = init + x [0] + x [1] + ... + x [k - 1]` for the rows of `x [k, n]`, which has `out`'s type, f32 or bf16.
    /// Each row is added in f32, and the sum is rounded to that type at once. So the sum may be split anywhere: a later
    /// call continues it with the same bits. Without `init` it begins with `x [0]`.
    SumInOrder "sum_in_order": x [k, n] {
        out: Out<'a> [n] plus(init),
        x: In<'a> [k, n],
        init: Init<'a> [] in_place,
    }
}

impl Contract for SumInOrder<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        check.that(self.x.dims()[0] > 0, || "`x` has no rows to add".into())
    }

    fn runs_beside(&self) -> bool {
        true
    }
}
