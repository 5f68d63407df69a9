//! Experts: a product an expert, the gated activation with the router's weight, and the sum of each token's rows.
//!
//! Shapes: `t` tokens, `k` choices of a token, `r = t k` rows, `e` experts. Tables are those of
//! [`super::GroupByExpert`].

use super::Init;
use super::check::{Check, Checked, View};
use super::contract::{Contract, Operand, changes, reads, sets, writes};
use super::matmul::check_types;
use crate::Target;
use memory::{DType, In, Out};

/// Rows that are grouped by expert: `r` rows of `x [r, w]`, or those that the products find in `x [t, w]` by each row's
/// token, `row_token [r]` (i32).
#[derive(Clone, Copy)]
pub struct ExpertRows<'a> {
    pub x: In<'a>,
    pub row_token: Option<In<'a>>,
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
/// and `rows`, m wide: `out = rows weights_i^T` with `weights [e, n, m]`, or if `by_columns` `out = rows weights_i` with
/// `weights [e, m, n]`. All of one type; sums are f32 and rounded once. `scratch` is f32 of
/// [`ExpertRows::scratch_elements`].
pub struct GroupedMatmul<'a> {
    pub out: Out<'a>,
    pub scratch: Out<'a>,
    pub rows: ExpertRows<'a>,
    pub weights: In<'a>,
    pub by_columns: bool,
    pub offsets: In<'a>,
}

/// The gradient of the weights of [`GroupedMatmul`]: `out_i = init + dy^T rows` of the rows of expert `i`, with
/// `out [e, n, m]` (f32 or bf16), `dy` n wide and `rows` m wide of one type, `offsets [e + 1]` (i32). An expert without
/// rows gets zeros, or when accumulating keeps what it has. `scratch` is f32, as much as both [`ExpertRows`] need.
pub struct GroupedGradient<'a> {
    pub out: Out<'a>,
    pub scratch: Out<'a>,
    pub dy: ExpertRows<'a>,
    pub rows: ExpertRows<'a>,
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

    /// The f32 elements of scratch that a product of them needs: a function of these alone. The CPU multiplies f32 by a
    /// library that wants rows at equal distances, so it gathers them.
    pub fn scratch_elements(&self, target: Target) -> usize {
        match (target, self.x.dtype(), self.row_token) {
            (Target::Cpu, DType::F32, Some(_)) => self.dims().iter().product(),
            _ => 0,
        }
    }

    fn check(&self, check: &Check, name: &str) -> Checked {
        check.real_of_rank(name, &self.x, 2)?;
        self.row_token.iter().try_for_each(|tokens| {
            check.rank("row_token", tokens, 1)?;
            table(check, "row_token", tokens, tokens.dims())
        })
    }

    fn operands(&self) -> impl Iterator<Item = Operand<'a>> {
        [self.x].into_iter().chain(self.row_token).map(reads)
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
        self.rows.check(check, "rows")?;
        check.rank("weights", &self.weights, 3)?;
        let [rows, inner] = self.rows.dims();
        let [experts, first, second] = sizes(&self.weights);
        let (outputs, shape) = match self.by_columns {
            false => (first, [experts, first, inner]),
            true => (second, [experts, inner, second]),
        };
        let dtype = self.rows.x.dtype();
        check.tensor("weights", &self.weights, &shape, dtype)?;
        check.tensor("out", &self.out, &[rows, outputs], dtype)?;
        check_types(check, &[dtype])?;
        let elements = self.rows.scratch_elements(check.target);
        check.tensor("scratch", &self.scratch, &[elements], DType::F32)?;
        table(check, "offsets", &self.offsets, &[experts + 1])
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let read = self.rows.operands();
        let read = read.chain([self.weights, self.offsets].map(reads));
        [writes(&self.out)].into_iter().chain(read).collect()
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
    fn name(&self) -> &'static str {
        "grouped_gradient"
    }

    fn check(&self, check: &Check) -> Checked {
        check.no_residual(&self.init)?;
        self.dy.check(check, "dy")?;
        self.rows.check(check, "rows")?;
        check.rank("out", &self.out, 3)?;
        let ([rows, outputs], [others, inner]) = (self.dy.dims(), self.rows.dims());
        check.that(rows == others, || {
            format!("`dy` has {rows} rows, and `rows` are {others}")
        })?;
        let dtype = self.dy.x.dtype();
        check.tensor("rows", &self.rows.x, self.rows.x.dims(), dtype)?;
        let [experts, ..] = sizes::<3>(&self.out);
        check.real("out", &self.out, &[experts, outputs, inner])?;
        check_types(check, &[self.out.dtype(), dtype])?;
        let elements = [self.dy, self.rows].map(|rows| rows.scratch_elements(check.target));
        let elements = elements.iter().sum();
        check.tensor("scratch", &self.scratch, &[elements], DType::F32)?;
        table(check, "offsets", &self.offsets, &[experts + 1])
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let read = self.dy.operands().chain(self.rows.operands());
        let read = read.chain([reads(self.offsets)]);
        let out = [sets(&self.out, &self.init)].into_iter();
        out.chain(read).collect()
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
