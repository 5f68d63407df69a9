//! The experts of a feed-forward layer: products that read rows by each row's token, and the sum of each token's rows.
//! Tables are those of [`super::RouterTables`]. `t` tokens of `k` choices are `r` rows, of `e` experts `f` wide.

use super::{RouterChoice, RouterTables};
use crate::activation::Dimension;
use crate::expert_adapter::{ExpertAdapter, grouped_gradient, grouped_product};
use crate::matrix::{WeightMatrix, matrix};
use crate::parameters::{ParameterId, PartParameters};
use crate::stage::{Io, Stage};
use crate::stored::Stored;
use crate::{Activation, Extent, Label, Linear, Pass, Result};
use kernels::Init;
use kernels::operation::{
    ExpertBias, ExpertBiasDweights, ExpertBiasGradient, ExpertRows, GateFunction, GatedActivation,
    GatedActivationBackward, OutputForm, RowWeights, SumRows, WeighedBias, WeighedGatedActivation,
    WeighedGatedActivationBackward,
};
use memory::{Buffer, In, Out};

/// The same linear layer of every expert: `weight [e, outputs, inputs]`, and its adapter if it is a target.
#[derive(Clone, Debug)]
pub struct ExpertLinear {
    weight: ParameterId,
    adapter: Option<ExpertAdapter>,
    inputs: usize,
    outputs: usize,
}

impl ExpertLinear {
    /// Declares the parameter `name [experts, outputs, inputs]`, which files store in this way.
    pub fn declare(
        parameters: &mut PartParameters,
        name: &str,
        [experts, outputs, inputs]: [usize; 3],
        stored: Stored,
    ) -> ExpertLinear {
        let shape = [experts, outputs, inputs];
        ExpertLinear {
            weight: parameters.experts(name, shape, stored),
            adapter: ExpertAdapter::declare(parameters, name, shape),
            inputs,
            outputs,
        }
    }

    fn parameters(&self) -> impl Iterator<Item = ParameterId> {
        let factors = self.adapter.iter().flat_map(ExpertAdapter::parameters);
        [self.weight].into_iter().chain(factors)
    }

    /// What its adapter keeps, with so many rows for each token.
    fn writes(&self, choices: usize) -> Option<(Activation, Extent)> {
        let (kept, rank) = self.adapter.as_ref()?.writes();
        Some((kept, rows(choices, rank)))
    }

    /// `y [r, outputs] = x [r, inputs] W^T`, each row with the weight of its expert, or `by_columns`
    /// `dx [r, inputs] = dy [r, outputs] W`.
    fn product(
        &self,
        pass: &mut Pass,
        (mut out, rows): (Out, ExpertRows),
        offsets: In,
        by_columns: bool,
    ) -> Result {
        let of_experts = offsets.elements() - 1;
        for group in pass.groups_of(self.weight, of_experts) {
            let weights = match group.unit {
                None => matrix(pass, &[self.weight])?,
                Some(unit) => {
                    pass.use_unit(unit)?;
                    WeightMatrix::Stored(pass.group(self.weight, unit))
                }
            };
            let offsets = offsets.rows(group.experts.start..group.experts.end + 1);
            let product = (out.reborrow(), rows);
            let weights = (weights.view(), by_columns);
            grouped_product(pass, product, weights, (offsets, of_experts))?;
        }
        pass.use_own_matrices()
    }

    /// The adapter, if the pass has adapters.
    fn adapter(&self, pass: &Pass) -> Option<&ExpertAdapter> {
        self.adapter.as_ref().filter(|_| pass.has_adapters())
    }

    /// Adds to the gradients of its parameters. Gives what [`ExpertAdapter::input_gradient`] takes.
    fn add_gradients(
        &self,
        pass: &mut Pass,
        dy: ExpertRows,
        x: ExpertRows,
        offsets: In,
    ) -> Result<Option<Buffer>> {
        grouped_gradient(pass, self.weight, (dy, x), offsets)?;
        let adapter = self.adapter.as_ref();
        let through = adapter.map(|adapter| adapter.add_gradients(pass, dy, x, offsets));
        through.transpose()
    }

    /// Whether its input is read for a gradient.
    fn reads_input_backward(&self) -> bool {
        self.weight.is_trained() || self.adapter.is_some()
    }

    /// What the backward pass reads: the input if a weight or a factor is trained, and what the adapter keeps.
    fn backward_reads(&self, input: Activation) -> impl Iterator<Item = Activation> {
        let kept = self.adapter.as_ref().map(|adapter| adapter.writes().0);
        let input = self.reads_input_backward().then_some(input);
        input.into_iter().chain(kept)
    }

    /// FLOPs of the three products for one row.
    fn flops_per_row(&self) -> u64 {
        let of_adapter = self
            .adapter
            .as_ref()
            .map_or(0, ExpertAdapter::flops_per_row);
        6 * self.inputs as u64 * self.outputs as u64 + of_adapter
    }
}

/// `out [t, n] = init +` the sum of each token's rows.
fn sum_rows(pass: &Pass, out: Out, (rows, slot_row): (In, In), init: Init) -> Result {
    Ok(pass.kernels().run(SumRows {
        out,
        rows,
        slot_row,
        bias: None,
        init,
    })?)
}

/// Gate and up of every row, by its expert: products of the input's rows, found by each row's token.
pub struct ExpertsUp {
    /// The products.
    pub linear: ExpertLinear,
    /// What they read.
    pub input: Activation,
    /// Experts that a token is sent to.
    pub choices: usize,
}

impl ExpertsUp {
    /// `[r, 2 f]`: gate and up, side by side.
    pub const GATE_UP: Activation =
        Activation::new("expert_gate_up", "d_expert_gate_up", Label::MOE);
}

impl Stage for ExpertsUp {
    fn name(&self) -> &'static str {
        "moe_up"
    }

    fn io(&self) -> Io {
        let tables = [RouterTables::ROW_TOKEN, RouterTables::OFFSETS];
        let read = self.linear.backward_reads(self.input);
        let backward = tables.into_iter().chain([RouterTables::SLOT_ROW]);
        Io {
            reads: [self.input].into_iter().chain(tables).collect(),
            writes: [(ExpertsUp::GATE_UP, rows(self.choices, self.linear.outputs))]
                .into_iter()
                .chain(self.linear.writes(self.choices))
                .collect(),
            backward_reads: read.chain(backward).collect(),
        }
    }

    fn parameters(&self) -> Vec<ParameterId> {
        self.linear.parameters().collect()
    }

    fn flops_per_token(&self, _seq: usize) -> u64 {
        self.choices as u64 * self.linear.flops_per_row()
    }

    fn choices(&self) -> usize {
        self.choices
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let (x, row_token) = (pass.pull(self.input)?, pass.pull(RouterTables::ROW_TOKEN)?);
        let offsets = pass.pull(RouterTables::OFFSETS)?;
        let rows = of_tokens(&x, &row_token);
        let mut out = pass.output(ExpertsUp::GATE_UP)?;
        if let Some(out) = &mut out {
            let product = (out.view_mut(), rows);
            self.linear.product(pass, product, offsets.view(), false)?;
        }
        if let Some(adapter) = self.linear.adapter(pass) {
            let mut added = match &out {
                Some(out) => Some(pass.temporary("expert_lora", out.dims())?),
                None => None,
            };
            adapter.forward(pass, super::written(&mut added), rows, offsets.view())?;
            if let (Some(out), Some(added)) = (&mut out, &added) {
                super::add(pass.kernels(), out.view_mut(), added.view())?;
            }
        }
        pass.put(ExpertsUp::GATE_UP, out);
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result {
        let dy = pass.gradient(ExpertsUp::GATE_UP);
        let (row_token, slot_row) = (
            pass.pull(RouterTables::ROW_TOKEN)?,
            pass.pull(RouterTables::SLOT_ROW)?,
        );
        let offsets = pass.pull(RouterTables::OFFSETS)?;
        let mut through = None;
        if self.linear.reads_input_backward() {
            let x = pass.pull(self.input)?;
            let (dy, rows) = (ExpertRows::in_order(dy.view()), of_tokens(&x, &row_token));
            through = self.linear.add_gradients(pass, dy, rows, offsets.view())?;
            pass.release(self.input, x);
        }
        let mut drows = pass.temporary("d_expert_in", [dy.dims()[0], self.linear.inputs])?;
        let product = (drows.view_mut(), ExpertRows::in_order(dy.view()));
        self.linear.product(pass, product, offsets.view(), true)?;
        drop(dy);
        let (mut dx, init) = pass.gradient_to_add(self.input)?;
        let sums = (drows.view(), slot_row.view());
        sum_rows(pass, dx.view_mut(), sums, init)?;
        if let (Some(adapter), Some(through)) = (&self.linear.adapter, &through) {
            adapter.input_gradient(pass, drows.view_mut(), through.view(), offsets.view())?;
            let sums = (drows.view(), slot_row.view());
            sum_rows(pass, dx.view_mut(), sums, Init::Accumulate)?;
        }
        pass.file_gradient(self.input, dx);
        Ok(())
    }
}

/// Rows of experts that are found by each row's token.
fn of_tokens<'a>(x: &'a Buffer, row_token: &'a Buffer) -> ExpertRows<'a> {
    ExpertRows {
        x: x.view(),
        row_token: Some(row_token.view()),
    }
}

/// act = weight function(gate) up. With the weight in the activation, the backward pass needs no product of the way down.
pub struct ExpertActivation {
    /// The name in reports.
    pub name: &'static str,
    /// Gate and up, side by side.
    pub input: Activation,
    /// What comes of it.
    pub output: Activation,
    /// The weights, and the table by which rows find theirs; none: weights are 1.
    pub weights: Option<(Activation, Option<Activation>)>,
    /// Rows for each token.
    pub choices: usize,
    /// Width of act.
    pub width: usize,
    /// The function of gate and up.
    pub gate: GateFunction,
    /// The bias of gate and up of each expert, `[e 2 f]`, which is added here: [`ExpertsUp`] leaves it out.
    pub bias: Option<ParameterId>,
}

impl ExpertActivation {
    /// `[r, f]`, of the chosen experts.
    pub const ACT: Activation = Activation::new("expert_act", "d_expert_act", Label::MOE_ACT);
    /// `[t, 2 f]` of the shared experts: gate and up, side by side.
    pub const SHARED_GATE_UP: Activation =
        Activation::new("shared_gate_up", "d_shared_gate_up", Label::SHARED_EXPERTS);
    /// `[t, f]`, of the shared experts.
    pub const SHARED_ACT: Activation =
        Activation::new("shared_act", "d_shared_act", Label::SHARED_EXPERTS);

    fn reads(&self) -> Vec<Activation> {
        let weights = self.weights.iter();
        let read = weights.flat_map(|(weights, table)| [Some(*weights), *table]);
        let ids = self.bias.map(|_| RouterChoice::IDS);
        let read = read.flatten().chain(ids);
        [self.input].into_iter().chain(read).collect()
    }

    /// The numbers of the chosen experts, if they have biases.
    fn ids(&self, pass: &mut Pass) -> Result<Option<Pulled>> {
        let ids = self.bias.map(|_| pass.pull(RouterChoice::IDS));
        ids.transpose()
    }

    /// The bias of gate and up, by the chosen experts.
    fn bias_of<'p>(&self, pass: &'p Pass, ids: Option<&'p Buffer>) -> Option<ExpertBias<'p>> {
        let width = 2 * self.width;
        Some(expert_bias(pass, (self.bias?, width), ids?))
    }

    /// Adds the gradient of the bias, from that of gate and up.
    fn bias_gradient(&self, pass: &mut Pass, dgate_up: In) -> Result {
        let Some(bias) = self.bias.filter(|bias| bias.is_trained()) else {
            return Ok(());
        };
        let offsets = pass.pull(RouterTables::OFFSETS)?;
        let dy = ExpertRows::in_order(dgate_up);
        add_bias_gradient(pass, bias, (dy, None), offsets.view())
    }
}

/// The biases of experts, of so many elements each, by the chosen experts.
fn expert_bias<'p>(
    pass: &'p Pass,
    (bias, width): (ParameterId, usize),
    ids: &'p Buffer,
) -> ExpertBias<'p> {
    let all = pass.parameter(bias);
    ExpertBias {
        bias: all.reshape([all.elements() / width, width]),
        ids: ids.view(),
    }
}

/// Adds to the gradient of the biases of experts the sums of each one's rows, with weights if there are some.
fn add_bias_gradient(
    pass: &mut Pass,
    bias: ParameterId,
    (dy, weights): (ExpertRows, Option<RowWeights>),
    offsets: In,
) -> Result {
    let (kernels, width) = (pass.kernels(), dy.dims()[1]);
    let Some((out, init)) = pass.accumulate(bias) else {
        return Ok(());
    };
    let experts = out.elements() / width;
    Ok(kernels.run(ExpertBiasGradient {
        out: out.reshape([experts, width]),
        dy,
        weights,
        offsets,
        init,
    })?)
}

impl Stage for ExpertActivation {
    fn name(&self) -> &'static str {
        self.name
    }

    fn io(&self) -> Io {
        Io {
            reads: self.reads(),
            writes: vec![(self.output, rows(self.choices, self.width))],
            backward_reads: {
                let trained = self.bias.filter(|bias| bias.is_trained());
                let offsets = trained.map(|_| RouterTables::OFFSETS);
                self.reads().into_iter().chain(offsets).collect()
            },
        }
    }

    fn parameters(&self) -> Vec<ParameterId> {
        self.bias.into_iter().collect()
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let gate_up = pass.pull(self.input)?;
        let weights = pulled(pass, self.weights)?;
        let ids = self.ids(pass)?;
        let mut act = pass.output(self.output)?;
        if let Some(act) = &mut act {
            let (act, gate_up) = (act.view_mut(), gate_up.view());
            match &weights {
                None => pass.kernels().run(GatedActivation {
                    act,
                    gate_up,
                    form: OutputForm::Values,
                    function: self.gate,
                }),
                Some((weights, table)) => pass.kernels().run(WeighedGatedActivation {
                    act,
                    gate_up,
                    weights: weights.view(),
                    row_slot: table.as_ref().map(|table| table.view()),
                    bias: self.bias_of(pass, ids.as_deref()),
                    function: self.gate,
                }),
            }?;
        }
        pass.put(self.output, act);
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result {
        let dact = pass.gradient(self.output);
        let weights = pulled(pass, self.weights)?;
        let ids = self.ids(pass)?;
        let mut gate_up = pass.take(self.input)?;
        match &weights {
            None => pass.kernels().run(GatedActivationBackward {
                gate_up: gate_up.view_mut(),
                dact: dact.view(),
                largest: None,
                function: self.gate,
            })?,
            Some((weights, table)) => {
                let (of, _) = self.weights.expect("they were pulled");
                let (mut dweights, dweights_init) = match self.bias {
                    // ExpertsDown has a bias too, and has filed its part.
                    Some(_) => pass.gradient_to_add(of)?,
                    None => {
                        let dweights = pass.temporary_f32(of.gradient_name(), weights.dims())?;
                        (dweights, Init::Overwrite)
                    }
                };
                pass.kernels().run(WeighedGatedActivationBackward {
                    gate_up: gate_up.view_mut(),
                    dweights: dweights.view_mut(),
                    dweights_init,
                    dact: dact.view(),
                    weights: weights.view(),
                    row_slot: table.as_ref().map(|table| table.view()),
                    bias: self.bias_of(pass, ids.as_deref()),
                    function: self.gate,
                })?;
                pass.file_gradient(of, dweights);
            }
        }
        drop((dact, weights));
        self.bias_gradient(pass, gate_up.view())?;
        pass.file_gradient(self.input, gate_up);
        Ok(())
    }
}

type Pulled = std::rc::Rc<Buffer>;

/// Weights and table, if there are weights.
fn pulled(
    pass: &mut Pass,
    weights: Option<(Activation, Option<Activation>)>,
) -> Result<Option<(Pulled, Option<Pulled>)>> {
    let Some((weights, table)) = weights else {
        return Ok(None);
    };
    let table = table.map(|table| pass.pull(table)).transpose()?;
    Ok(Some((pass.pull(weights)?, table)))
}

/// next x `[t, h]` = residual + the sum of each token's rows of expert_act Wd^T + weight b, + shared_act Ws^T.
pub struct ExpertsDown {
    /// The products of the chosen experts.
    pub linear: ExpertLinear,
    /// Their biases, `[e h]`.
    pub bias: Option<ParameterId>,
    /// That of the shared experts, if there are some.
    pub shared: Option<Linear>,
    /// The residual stream.
    pub residual: Activation,
    /// Experts that a token is sent to.
    pub choices: usize,
}

impl ExpertsDown {
    /// The weights of the chosen experts and their numbers, if experts have biases.
    fn chosen(&self, pass: &mut Pass) -> Result<Option<(Pulled, Pulled)>> {
        if self.bias.is_none() {
            return Ok(None);
        }
        let weights = pass.pull(RouterChoice::WEIGHTS)?;
        Ok(Some((weights, pass.pull(RouterChoice::IDS)?)))
    }

    /// Adds the gradient of the biases, and files that of the weights by them, to which [`ExpertActivation`] adds its own.
    fn bias_gradients(&self, pass: &mut Pass, dout: &Buffer, offsets: In) -> Result {
        let (Some(bias), Some((weights, ids))) = (self.bias, self.chosen(pass)?) else {
            return Ok(());
        };
        let of = RouterChoice::WEIGHTS;
        let mut dweights = pass.temporary_f32(of.gradient_name(), weights.dims())?;
        pass.kernels().run(ExpertBiasDweights {
            dweights: dweights.view_mut(),
            dy: dout.view(),
            bias: expert_bias(pass, (bias, self.linear.outputs), &ids),
        })?;
        pass.file_gradient(of, dweights);
        if !bias.is_trained() {
            return Ok(());
        }
        let row_slot = pass.pull(RouterTables::ROW_SLOT)?;
        let row_token = pass.pull(RouterTables::ROW_TOKEN)?;
        let weights = RowWeights {
            weights: weights.view(),
            row_slot: Some(row_slot.view()),
        };
        let dy = of_tokens(dout, &row_token);
        add_bias_gradient(pass, bias, (dy, Some(weights)), offsets)
    }
}

impl Stage for ExpertsDown {
    fn name(&self) -> &'static str {
        "moe_down"
    }

    fn io(&self) -> Io {
        let shared = self.shared.iter().map(|_| ExpertActivation::SHARED_ACT);
        let tables = [RouterTables::OFFSETS, RouterTables::SLOT_ROW];
        let reads = [self.residual, ExpertActivation::ACT].into_iter();
        let of_bias = self
            .bias
            .map(|_| [RouterChoice::WEIGHTS, RouterChoice::IDS]);
        let of_bias = of_bias.into_iter().flatten();
        let of_gradient = self.bias.filter(|bias| bias.is_trained());
        let of_gradient = of_gradient.map(|_| RouterTables::ROW_SLOT);
        let shared_read = self.shared.iter();
        let shared_read =
            shared_read.flat_map(|linear| linear.backward_reads(ExpertActivation::SHARED_ACT));
        let backward = self.linear.backward_reads(ExpertActivation::ACT);
        Io {
            reads: reads
                .chain(tables)
                .chain(shared)
                .chain(of_bias.clone())
                .collect(),
            writes: [(Activation::NEXT_X, Extent::tokens(self.linear.outputs))]
                .into_iter()
                .chain(self.linear.writes(self.choices))
                .collect(),
            backward_reads: backward
                .chain([RouterTables::OFFSETS, RouterTables::ROW_TOKEN])
                .chain(shared_read)
                .chain(of_bias)
                .chain(of_gradient)
                .collect(),
        }
    }

    fn linears(&self) -> Vec<&Linear> {
        self.shared.iter().collect()
    }

    fn parameters(&self) -> Vec<ParameterId> {
        let shared = self.shared.iter().flat_map(Linear::parameters);
        let parameters = self.linear.parameters().chain(self.bias);
        parameters.chain(shared).collect()
    }

    fn flops_per_token(&self, _seq: usize) -> u64 {
        let shared = self.shared.as_ref().map_or(0, Linear::flops_per_token);
        self.choices as u64 * self.linear.flops_per_row() + shared
    }

    fn choices(&self) -> usize {
        self.choices
    }

    fn forward(&self, pass: &mut Pass) -> Result {
        let residual = pass.pull(self.residual)?;
        let act = pass.pull(ExpertActivation::ACT)?;
        let offsets = pass.pull(RouterTables::OFFSETS)?;
        let slot_row = pass.pull(RouterTables::SLOT_ROW)?;
        let chosen = self.chosen(pass)?;
        let shared = match &self.shared {
            Some(linear) => Some((linear, pass.pull(ExpertActivation::SHARED_ACT)?)),
            None => None,
        };
        let rows = ExpertRows::in_order(act.view());
        let mut out = pass.output(Activation::NEXT_X)?;
        let mut down = match &out {
            Some(_) => Some(pass.temporary("expert_out", [act.dims()[0], self.linear.outputs])?),
            None => None,
        };
        if let (Some(out), Some(down)) = (&mut out, &mut down) {
            let product = (down.view_mut(), rows);
            self.linear.product(pass, product, offsets.view(), false)?;
            let bias = chosen.as_ref().zip(self.bias);
            let bias = bias.map(|((weights, ids), bias)| WeighedBias {
                of: expert_bias(pass, (bias, self.linear.outputs), ids),
                weights: weights.view(),
            });
            pass.kernels().run(SumRows {
                out: out.view_mut(),
                rows: down.view(),
                slot_row: slot_row.view(),
                bias,
                init: Init::Add(residual.view()),
            })?;
        }
        if let Some(adapter) = self.linear.adapter(pass) {
            adapter.forward(pass, super::written(&mut down), rows, offsets.view())?;
            if let (Some(out), Some(down)) = (&mut out, &down) {
                let rows = (down.view(), slot_row.view());
                sum_rows(pass, out.view_mut(), rows, Init::Accumulate)?;
            }
        }
        drop(down);
        if let Some((linear, act)) = shared {
            linear.product(pass, super::written(&mut out), act.view(), Init::Accumulate)?;
        }
        pass.put(Activation::NEXT_X, out);
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result {
        let dout = pass.gradient(Activation::NEXT_X);
        if let Some(linear) = &self.shared {
            linear.backward(pass, ExpertActivation::SHARED_ACT, dout.view())?;
        }
        let row_token = pass.pull(RouterTables::ROW_TOKEN)?;
        let offsets = pass.pull(RouterTables::OFFSETS)?;
        let input = ExpertActivation::ACT;
        let dy = of_tokens(&dout, &row_token);
        let mut through = None;
        if self.linear.reads_input_backward() {
            let act = pass.pull(input)?;
            let rows = ExpertRows::in_order(act.view());
            through = self.linear.add_gradients(pass, dy, rows, offsets.view())?;
            pass.release(input, act);
        }
        self.bias_gradients(pass, &dout, offsets.view())?;
        let (mut dact, _) = pass.gradient_to_add(input)?;
        self.linear
            .product(pass, (dact.view_mut(), dy), offsets.view(), true)?;
        if let (Some(adapter), Some(through)) = (&self.linear.adapter, &through) {
            let mut added = pass.temporary("d_expert_lora", dact.dims())?;
            adapter.input_gradient(pass, added.view_mut(), through.view(), offsets.view())?;
            super::add(pass.kernels(), dact.view_mut(), added.view())?;
        }
        pass.file_gradient(input, dact);
        pass.file_gradient(self.residual, dout);
        Ok(())
    }
}

/// `[r, width]` of the compute type; with one choice, `[t, width]`.
fn rows(choices: usize, width: usize) -> Extent {
    match choices {
        1 => Extent::tokens(width),
        _ => Extent::of(&[Dimension::TokensTimes(choices), Dimension::Fixed(width)]),
    }
}
