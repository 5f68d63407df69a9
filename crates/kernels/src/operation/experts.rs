//! Experts: a product an expert, the gated activation with the router's weight, and the sum of each token's rows.
//!
//! Shapes: `t` tokens, `k` choices of a token, `r = t k` rows, `e` experts. Tables are those of
//! [`super::GroupByExpert`].

use super::Init;
use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::{Field, Visit, operation, size};
use super::operand::OperandRule;
use memory::{In, Out};

/// Rows that are grouped by expert: `r` rows of `x [r, w]`, or those that the products find in `x [t, w]` by each row's
/// token, `row_token [r]` (i32).
#[derive(Clone, Copy)]
pub struct ExpertRows<'a> {
    pub x: In<'a>,
    pub row_token: Option<In<'a>>,
}

operation! {
    /// `out [t, h] = init + ` the sum of each token's rows of `rows [r, h]`, `slot_row [t, k]` (i32). The sum is f32, in the
    /// order of the choices, then init, and is rounded once.
    SumRows "sum_rows": out [t, h], slot_row [_, k] {
        out: Out<'a> [t, h] plus(init),
        rows: In<'a> [t * k, h],
        slot_row: In<'a> [t, k] i32,
        init: Init<'a> [t, h],
    }

    /// A product an expert. The rows of expert `i` are those from `offsets [e + 1]` (i32) i to i + 1, of both `out [r, n]`
    /// and `rows`, m wide: `out = rows weights_i^T` with `weights [e, n, m]`, or if `by_columns` `out = rows weights_i` with
    /// `weights [e, m, n]`. All of one type; sums are f32 and rounded once. `scratch` is f32 of
    /// [`ExpertRows::scratch_elements`].
    GroupedMatmul "grouped_matmul": out [r, n], weights [e, _, _] {
        out: Out<'a> [r, n],
        scratch: Out<'a> [scratch.elements()] f32 uncounted,
        rows: ExpertRows<'a> [r, rows.width()],
        weights: In<'a> [..match by_columns {
            true => [e, rows.width(), n],
            false => [e, n, rows.width()],
        }],
        by_columns: bool,
        offsets: In<'a> [e + 1] i32,
    }

    /// The gradient of the weights of [`GroupedMatmul`]: `out_i = init + dy^T rows` of the rows of expert `i`, with
    /// `out [e, n, m]` (f32 or bf16), `dy` n wide and `rows` m wide of one type, `offsets [e + 1]` (i32). An expert without
    /// rows gets zeros, or when accumulating keeps what it has. `scratch` is f32, as much as both [`ExpertRows`] need.
    GroupedGradient "grouped_gradient": out [e, n, m] {
        out: Out<'a> [e, n, m] real plus(init),
        scratch: Out<'a> [scratch.elements()] f32 uncounted,
        dy: ExpertRows<'a> [dy.count(), n],
        rows: ExpertRows<'a> [dy.count(), m],
        offsets: In<'a> [e + 1] i32,
        init: Init<'a> [] in_place,
    }

    /// `act [r, f] = weight silu(gate) up`. Each row of `gate_up [r, 2 f]` has the columns of gate, then those of up; its
    /// weight is that of its choice, `weights` (f32, any shape) at `row_slot [r]` (i32), or at the row itself where no
    /// `row_slot` is given.
    WeighedSwiglu "weighed_swiglu": act [r, f] {
        act: Out<'a> [r, f],
        gate_up: In<'a> [r, 2 * f],
        weights: In<'a> [..weights] f32,
        row_slot: Option<In<'a>> [r] i32,
    }

    /// Gradients of [`WeighedSwiglu`] in place: `gate_up` becomes its own gradient, of `dact [r, f]`. `dweights` (f32, as
    /// many as `weights`) gets each row's sum of dact silu(gate) up, in f32, at the row's choice.
    WeighedSwigluBackward "weighed_swiglu_backward": gate_up, dact [r, f] {
        gate_up: Out<'a> [r, 2 * f] changes,
        dweights: Out<'a> [..weights] f32,
        dact: In<'a> [r, f],
        weights: In<'a> [..weights] f32,
        row_slot: Option<In<'a>> [r] i32,
    }
}

impl<'a> ExpertRows<'a> {
    /// Rows that lie in the order of experts.
    pub fn in_order(x: In<'a>) -> ExpertRows<'a> {
        ExpertRows { x, row_token: None }
    }

    /// Their number and their width.
    pub fn dims(&self) -> [usize; 2] {
        let rows = self.row_token.as_ref().unwrap_or(&self.x).dims()[0];
        [rows, self.x.dims()[1]]
    }

    /// Their number; none if they are no rows.
    fn count(&self) -> usize {
        size(Some(self.row_token.as_ref().unwrap_or(&self.x)), 0)
    }

    fn width(&self) -> usize {
        size(Some(&self.x), 1)
    }
}

impl Field for ExpertRows<'_> {
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked {
        let &[count, width] = rule.dims() else {
            unreachable!("rows and columns are declared");
        };
        let Some(row_token) = &self.row_token else {
            return self.x.visit(rule, visit);
        };
        self.x
            .visit(rule.shaped([size(Some(&self.x), 0), width]), &mut *visit)?;
        row_token.visit(rule.named("row_token").shaped([count]).i32(), visit)
    }
}

impl Contract for SumRows<'_> {}

impl Contract for GroupedMatmul<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        check.product_of(&[self.out.dtype()])
    }

    fn multiplications(&self) -> usize {
        self.out.elements() * self.rows.dims()[1]
    }

    /// Rows, inner size, outputs, experts.
    fn sizes(&self) -> Vec<usize> {
        let [rows, inner] = self.rows.dims();
        vec![rows, inner, self.out.dims()[1], self.weights.dims()[0]]
    }
}

impl Contract for GroupedGradient<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        check.product_of(&[self.out.dtype(), self.dy.x.dtype()])
    }

    fn multiplications(&self) -> usize {
        let [rows, outputs] = self.dy.dims();
        rows * outputs * self.rows.dims()[1]
    }

    /// Outputs, rows, inner size, experts.
    fn sizes(&self) -> Vec<usize> {
        let [rows, outputs] = self.dy.dims();
        let experts = self.out.dims()[0];
        vec![outputs, rows, self.rows.dims()[1], experts]
    }
}

/// Refuses other than one weight for each row.
fn one_each(check: &Check, weights: &In, rows: usize) -> Checked {
    check.that(weights.elements() == rows, || {
        let weights = weights.elements();
        format!("{weights} weights are not one for each of {rows} rows")
    })
}

impl Contract for WeighedSwiglu<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        one_each(check, &self.weights, self.act.dims()[0])
    }
}

impl Contract for WeighedSwigluBackward<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        one_each(check, &self.weights, self.dact.dims()[0])
    }
}
