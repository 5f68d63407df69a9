//! Experts: rows gathered by expert, a product an expert, the gated activation with the router's weight, and the sum
//! of each token's rows.
//!
//! Shapes: `t` tokens, `k` choices of a token, `r = t k` rows, `e` experts. Tables are those of
//! [`super::GroupByExpert`].

use super::Init;
use super::check::{Check, Checked, View};
use super::contract::{Contract, Operand, changes, reads, sets, writes};
use super::matmul::check_types;
use memory::{DType, In, Out};

/// `rows [r, h]` = the row of `x [t, h]` of each row's token, `row_token [r]` (i32).
pub struct GatherRows<'a> {
    pub rows: Out<'a>,
    pub x: In<'a>,
    pub row_token: In<'a>,
}

/// `out [t, h] = init + ` the sum of each token's rows of `rows [r, h]`, `slot_row [t, k]` (i32). The sum is f32, in the
/// order of the choices, then init, and is rounded once.
pub struct SumRows<'a> {
    pub out: Out<'a>,
    pub rows: In<'a>,
    pub slot_row: In<'a>,
    pub init: Init<'a>,
}

/// A product an expert. The rows of expert `i` are those from `offsets [e + 1]` (i32) i to i + 1, of both `out [r, n]`
/// and `x [r, m]`: `out = x weights_i^T` with `weights [e, n, m]`, or if `by_columns` `out = x weights_i` with
/// `weights [e, m, n]`. All of one type; sums are f32 and rounded once.
pub struct GroupedMatmul<'a> {
    pub out: Out<'a>,
    pub x: In<'a>,
    pub weights: In<'a>,
    pub by_columns: bool,
    pub offsets: In<'a>,
}

/// The gradient of the weights of [`GroupedMatmul`]: `out_i = init + dy^T x` of the rows of expert `i`, with
/// `out [e, n, m]` (f32 or bf16), `dy [r, n]` and `x [r, m]` of one type, `offsets [e + 1]` (i32). An expert without rows
/// gets zeros, or when accumulating keeps what it has.
pub struct GroupedGradient<'a> {
    pub out: Out<'a>,
    pub dy: In<'a>,
    pub x: In<'a>,
    pub offsets: In<'a>,
    pub init: Init<'a>,
}

/// `act [r, f] = weight silu(gate) up`. Each row of `gate_up [r, 2 f]` has the columns of gate, then those of up; its
/// weight is that of its choice, `weights` (f32, any shape) at `row_slot [r]` (i32), or at the row itself where no
/// `row_slot` is given.
pub struct WeighedSwiglu<'a> {
    pub act: Out<'a>,
    pub gate_up: In<'a>,
    pub weights: In<'a>,
    pub row_slot: Option<In<'a>>,
}

/// Gradients of [`WeighedSwiglu`] in place: `gate_up` becomes its own gradient, of `dact [r, f]`. `dweights` (f32, as
/// many as `weights`) gets each row's sum of dact silu(gate) up, in f32, at the row's choice.
pub struct WeighedSwigluBackward<'a> {
    pub gate_up: Out<'a>,
    pub dweights: Out<'a>,
    pub dact: In<'a>,
    pub weights: In<'a>,
    pub row_slot: Option<In<'a>>,
}

/// Checks a table of i32.
fn table(check: &Check, name: &str, table: &In, dims: &[usize]) -> Checked {
    check.tensor(name, table, dims, DType::I32)
}

/// The sizes of a tensor of rank 2, or of rank 3.
fn sizes<const N: usize>(x: &dyn View) -> [usize; N] {
    let x = x.view();
    x.dims().try_into().expect("the rank was checked")
}

impl Contract for GatherRows<'_> {
    fn name(&self) -> &'static str {
        "gather_rows"
    }

    fn check(&self, check: &Check) -> Checked {
        check.real_of_rank("x", &self.x, 2)?;
        check.rank("row_token", &self.row_token, 1)?;
        let rows = self.row_token.dims()[0];
        table(check, "row_token", &self.row_token, &[rows])?;
        let dims = [rows, self.x.dims()[1]];
        check.tensor("rows", &self.rows, &dims, self.x.dtype())
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![writes(&self.rows), reads(self.x), reads(self.row_token)]
    }
}

impl Contract for SumRows<'_> {
    fn name(&self) -> &'static str {
        "sum_rows"
    }

    fn check(&self, check: &Check) -> Checked {
        check.real_of_rank("rows", &self.rows, 2)?;
        check.rank("slot_row", &self.slot_row, 2)?;
        let [tokens, choices] = sizes(&self.slot_row);
        table(check, "slot_row", &self.slot_row, &[tokens, choices])?;
        let [rows, width] = sizes(&self.rows);
        check.that(rows == tokens * choices, || {
            format!("`rows` has {rows} rows, and `slot_row` names {tokens} x {choices}")
        })?;
        let dtype = self.rows.dtype();
        check.tensor("out", &self.out, &[tokens, width], dtype)?;
        match self.init {
            Init::Add(x) => check.tensor("init", &x, &[tokens, width], dtype),
            Init::Overwrite | Init::Accumulate => Ok(()),
        }
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![
            sets(&self.out, &self.init),
            reads(self.rows),
            reads(self.slot_row),
        ]
    }
}

impl Contract for GroupedMatmul<'_> {
    fn name(&self) -> &'static str {
        "grouped_matmul"
    }

    fn check(&self, check: &Check) -> Checked {
        check.real_of_rank("x", &self.x, 2)?;
        check.rank("weights", &self.weights, 3)?;
        let [rows, inner] = sizes(&self.x);
        let [experts, first, second] = sizes(&self.weights);
        let (outputs, shape) = match self.by_columns {
            false => (first, [experts, first, inner]),
            true => (second, [experts, inner, second]),
        };
        let dtype = self.x.dtype();
        check.tensor("weights", &self.weights, &shape, dtype)?;
        check.tensor("out", &self.out, &[rows, outputs], dtype)?;
        check_types(check, &[dtype])?;
        table(check, "offsets", &self.offsets, &[experts + 1])
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![
            writes(&self.out),
            reads(self.x),
            reads(self.weights),
            reads(self.offsets),
        ]
    }

    fn multiplications(&self) -> usize {
        self.out.elements() * self.x.dims()[1]
    }

    /// Rows, inner size, outputs, experts.
    fn sizes(&self) -> Vec<usize> {
        let [rows, inner] = sizes(&self.x);
        vec![rows, inner, self.out.dims()[1], self.weights.dims()[0]]
    }
}

impl Contract for GroupedGradient<'_> {
    fn name(&self) -> &'static str {
        "grouped_gradient"
    }

    fn check(&self, check: &Check) -> Checked {
        check.no_residual(&self.init)?;
        check.real_of_rank("dy", &self.dy, 2)?;
        check.rank("x", &self.x, 2)?;
        check.rank("out", &self.out, 3)?;
        let [rows, outputs] = sizes(&self.dy);
        let [experts, ..] = sizes::<3>(&self.out);
        let inner = self.x.dims()[1];
        check.tensor("x", &self.x, &[rows, inner], self.dy.dtype())?;
        check.real("out", &self.out, &[experts, outputs, inner])?;
        check_types(check, &[self.out.dtype(), self.dy.dtype()])?;
        table(check, "offsets", &self.offsets, &[experts + 1])
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![
            sets(&self.out, &self.init),
            reads(self.dy),
            reads(self.x),
            reads(self.offsets),
        ]
    }

    fn multiplications(&self) -> usize {
        self.dy.elements() * self.x.dims()[1]
    }

    /// Outputs, rows, inner size, experts.
    fn sizes(&self) -> Vec<usize> {
        let [rows, outputs] = sizes(&self.dy);
        let experts = self.out.dims()[0];
        vec![outputs, rows, self.x.dims()[1], experts]
    }
}

/// Checks activation, gate, up and weights.
fn weighed(
    check: &Check,
    (name, half): (&str, &dyn View),
    gate_up: &dyn View,
    weights: &In,
    row_slot: &Option<In>,
) -> Checked {
    check.real_of_rank(name, half, 2)?;
    let [rows, width] = sizes(half);
    let dtype = half.view().dtype();
    check.tensor("gate_up", gate_up, &[rows, 2 * width], dtype)?;
    check.tensor("weights", weights, weights.dims(), DType::F32)?;
    check.that(weights.elements() == rows, || {
        format!(
            "{} weights are not one for each of {rows} rows",
            weights.elements()
        )
    })?;
    row_slot
        .iter()
        .try_for_each(|slots| table(check, "row_slot", slots, &[rows]))
}

impl Contract for WeighedSwiglu<'_> {
    fn name(&self) -> &'static str {
        "weighed_swiglu"
    }

    fn check(&self, check: &Check) -> Checked {
        let act: (_, &dyn View) = ("act", &self.act);
        weighed(check, act, &self.gate_up, &self.weights, &self.row_slot)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let read = [self.gate_up, self.weights].into_iter();
        [writes(&self.act)]
            .into_iter()
            .chain(read.chain(self.row_slot).map(reads))
            .collect()
    }
}

impl Contract for WeighedSwigluBackward<'_> {
    fn name(&self) -> &'static str {
        "weighed_swiglu_backward"
    }

    fn check(&self, check: &Check) -> Checked {
        let dact: (_, &dyn View) = ("dact", &self.dact);
        weighed(check, dact, &self.gate_up, &self.weights, &self.row_slot)?;
        check.tensor("dweights", &self.dweights, self.weights.dims(), DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let read = [self.dact, self.weights].into_iter();
        [changes(&self.gate_up), writes(&self.dweights)]
            .into_iter()
            .chain(read.chain(self.row_slot).map(reads))
            .collect()
    }
}
