//! Experts: a product an expert, the gated activation with the router's weight, and the sum of each token's rows.
//!
//! Shapes: `t` tokens, `k` choices of a token, `r = t k` rows, `e` experts. Tables are those of
//! [`super::GroupByExpert`].

use super::check::{Check, Checked};
use super::contract::{Contract, Cost};
use super::declaration::{Field, HasShape, Visit, operation, size};
use super::operand::{Operand, OperandRule};
use super::{GateFunction, Init};
use memory::{In, Out};

/// Rows that are grouped by expert: `r` rows of `x [r, w]`, or those that the products find in `x [t, w]` by each row's
/// token, `row_token [r]` (i32).
#[derive(Clone, Copy)]
pub struct ExpertRows<'a> {
    pub x: In<'a>,
    pub row_token: Option<In<'a>>,
}

/// A bias of every expert, a row of `bias [e, n]`, and the expert of each choice: `ids` (i32, any shape) as [`super::Route`] chose.
#[derive(Clone, Copy)]
pub struct ExpertBias<'a> {
    pub bias: In<'a>,
    pub ids: In<'a>,
}

/// A bias that each choice adds with its weight: `weights` (f32, any shape).
#[derive(Clone, Copy)]
pub struct WeighedBias<'a> {
    pub of: ExpertBias<'a>,
    pub weights: In<'a>,
}

/// Weights of rows: those of their choices, `weights` (f32, any shape) at `row_slot [r]` (i32), or at the row itself where no
/// `row_slot` is given.
#[derive(Clone, Copy)]
pub struct RowWeights<'a> {
    pub weights: In<'a>,
    pub row_slot: Option<In<'a>>,
}

operation! {
    /// `out [t, h] = init + ` the sum of each token's rows of `rows [r, h]`, `slot_row [t, k]` (i32). With `bias [e, h]` each choice
    /// adds its weight of `bias_weights [t, k]` (f32) times its expert's bias, too. The sum is f32, in the order of the choices,
    /// then init, and is rounded once.
    SumRows "sum_rows": out [t, h], slot_row [_, k] {
        out: Out<'a> [t, h] plus(init),
        rows: In<'a> [t * k, h],
        slot_row: In<'a> [t, k] i32,
        bias: Option<WeighedBias<'a>> [t * k, h],
        init: Init<'a> [t, h],
    }

    /// A product an expert. The rows of expert `i` are those from `offsets [e + 1]` (i32) i to i + 1, of both `out [r, n]`
    /// and `rows`, m wide: `out = rows weights_i^T` with `weights [e, n, m]`, or if `by_columns` `out = rows weights_i` with
    /// `weights [e, m, n]`. All of one type; sums are f32 and rounded once. These may be some of `of_experts` experts: rows of others keep
    /// what they have, and a plan expects an equal share of rows for each. `scratch` is f32 of
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
        of_experts: usize,
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
        of_experts: usize,
        init: Init<'a> [] in_place,
    }

    /// `act [r, f]`: weight times `function` of gate and up. Each row of `gate_up [r, 2 f]` has the columns of gate, then those of
    /// up; its weight is that of its choice, `weights` (f32, any shape) at `row_slot [r]` (i32), or at the row itself where no
    /// `row_slot` is given. `bias [e, 2 f]` of the choice's expert is added to gate and up first, in f32.
    WeighedGatedActivation "weighed_swiglu": act [r, f] {
        act: Out<'a> [r, f],
        gate_up: In<'a> [r, 2 * f],
        function: GateFunction,
        weights: In<'a> [..weights] f32,
        row_slot: Option<In<'a>> [r] i32,
        bias: Option<ExpertBias<'a>> [r, 2 * f],
    }

    /// Gradients of [`WeighedGatedActivation`] in place: `gate_up`, without the bias, becomes its own gradient, of `dact [r, f]`. `dweights`
    /// (f32, as many as `weights`) `= dweights_init +` each row's sum of dact times `function`, in f32, at the row's choice.
    WeighedGatedActivationBackward "weighed_swiglu_backward": gate_up, dact [r, f] {
        gate_up: Out<'a> [r, 2 * f] changes,
        function: GateFunction,
        dweights: Out<'a> [..weights] f32 plus(dweights_init),
        dweights_init: Init<'a> [] in_place,
        dact: In<'a> [r, f],
        weights: In<'a> [..weights] f32,
        row_slot: Option<In<'a>> [r] i32,
        bias: Option<ExpertBias<'a>> [r, 2 * f],
    }

    /// The gradient of experts' biases: `out_i [n] = init +` the sum of expert i's rows of `dy`, n wide, each times its weight if
    /// `weights` are given. `out [e, n]` (f32 or bf16), `offsets [e + 1]` (i32). The sum is f32 in a fixed order, and is rounded once.
    /// An expert without rows gets zeros, or when accumulating keeps what it has.
    ExpertBiasGradient "expert_bias_gradient": out [e, n] {
        out: Out<'a> [e, n] real plus(init),
        dy: ExpertRows<'a> [dy.count(), n],
        weights: Option<RowWeights<'a>> [dy.count()],
        offsets: In<'a> [e + 1] i32,
        init: Init<'a> [] in_place,
    }

    /// The gradient of choices' weights by the bias that [`SumRows`] adds: `dweights [t, k]` (f32) = the product of `dy [t, h]` and
    /// `bias [e, h]` of the choice's expert.
    ExpertBiasDweights "expert_bias_dweights": dweights [t, k], dy [_, h] {
        dweights: Out<'a> [t, k] f32,
        dy: In<'a> [t, h],
        bias: ExpertBias<'a> [t * k, h],
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

impl ExpertBias<'_> {
    fn check(&self, check: &Check, choices: usize) -> Checked {
        one_each(check, "ids", &self.ids, choices)
    }
}

impl Field for ExpertBias<'_> {
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked {
        let &[_, width] = rule.dims() else {
            unreachable!("choices and columns are declared");
        };
        let experts = size(Some(&self.bias), 0);
        self.bias
            .visit(rule.shaped([experts, width]), &mut *visit)?;
        let ids = rule.named("ids").shaped(self.ids.shape());
        self.ids.visit(ids.i32(), visit)
    }
}

impl Field for WeighedBias<'_> {
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked {
        self.of.visit(rule, &mut *visit)?;
        let weights = rule.named("bias_weights").shaped(self.weights.shape());
        self.weights.visit(weights.f32(), visit)
    }
}

impl Field for RowWeights<'_> {
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked {
        let weights = rule.shaped(self.weights.shape());
        self.weights.visit(weights.f32(), &mut *visit)?;
        self.row_slot.visit(rule.named("row_slot").i32(), visit)
    }
}

impl Contract for SumRows<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let choices = self.slot_row.elements();
        self.bias.as_ref().map_or(Ok(()), |bias| {
            bias.of.check(check, choices)?;
            one_each(check, "bias_weights", &bias.weights, choices)
        })
    }
}

impl Contract for GroupedMatmul<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        are_among(check, self.weights.dims()[0], self.of_experts)?;
        check.product_of(&[self.out.dtype()])
    }

    fn multiplications(&self) -> usize {
        self.out.elements() * self.rows.dims()[1] * self.weights.dims()[0] / self.of_experts
    }

    fn cost(&self) -> Cost {
        let of_rows = self.out.bytes() + self.rows.x.bytes();
        cost_of_some(self, of_rows, [self.weights.dims()[0], self.of_experts])
    }

    /// Rows, inner size, outputs, experts.
    fn sizes(&self) -> Vec<usize> {
        let [rows, inner] = self.rows.dims();
        vec![rows, inner, self.out.dims()[1], self.weights.dims()[0]]
    }
}

impl Contract for GroupedGradient<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        are_among(check, self.out.dims()[0], self.of_experts)?;
        check.product_of(&[self.out.dtype(), self.dy.x.dtype()])
    }

    fn multiplications(&self) -> usize {
        let [rows, outputs] = self.dy.dims();
        rows * outputs * self.rows.dims()[1] * self.out.dims()[0] / self.of_experts
    }

    fn cost(&self) -> Cost {
        let of_rows = self.dy.x.bytes() + self.rows.x.bytes();
        cost_of_some(self, of_rows, [self.out.dims()[0], self.of_experts])
    }

    /// Outputs, rows, inner size, experts.
    fn sizes(&self) -> Vec<usize> {
        let [rows, outputs] = self.dy.dims();
        let experts = self.out.dims()[0];
        vec![outputs, rows, self.rows.dims()[1], experts]
    }
}

/// Refuses more experts than there are.
fn are_among(check: &Check, experts: usize, of_experts: usize) -> Checked {
    check.that(experts <= of_experts, || {
        format!("{experts} experts are not some of {of_experts}")
    })
}

/// The cost of some experts, which touch their share of the rows.
fn cost_of_some(op: &impl Contract, of_rows: usize, [experts, of_experts]: [usize; 2]) -> Cost {
    let all: u64 = op.operands().iter().map(Operand::bytes).sum();
    Cost {
        flops: op.flops(),
        bytes: all - (of_rows - of_rows * experts / of_experts) as u64,
    }
}

/// Refuses other than one element for each row.
fn one_each(check: &Check, name: &str, x: &In, rows: usize) -> Checked {
    check.that(x.elements() == rows, || {
        let elements = x.elements();
        format!("{elements} {name} are not one for each of {rows} rows")
    })
}

/// Refuses weights and experts that are not one for each row.
fn weight_and_expert(
    check: &Check,
    weights: &In,
    bias: &Option<ExpertBias>,
    rows: usize,
) -> Checked {
    one_each(check, "weights", weights, rows)?;
    let bias = bias.as_ref();
    bias.map_or(Ok(()), |bias| bias.check(check, rows))
}

impl Contract for WeighedGatedActivation<'_> {
    fn numbers(&self, check: &Check) -> Checked {
        self.function.check(check)
    }

    fn conditions(&self, check: &Check) -> Checked {
        weight_and_expert(check, &self.weights, &self.bias, self.act.dims()[0])
    }
}

impl Contract for WeighedGatedActivationBackward<'_> {
    fn numbers(&self, check: &Check) -> Checked {
        self.function.check(check)
    }

    fn conditions(&self, check: &Check) -> Checked {
        weight_and_expert(check, &self.weights, &self.bias, self.dact.dims()[0])
    }
}

impl Contract for ExpertBiasGradient<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let weights = self.weights.as_ref();
        weights.map_or(Ok(()), |of| {
            one_each(check, "weights", &of.weights, self.dy.count())
        })
    }
}

impl Contract for ExpertBiasDweights<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        self.bias.check(check, self.dweights.elements())
    }
}
