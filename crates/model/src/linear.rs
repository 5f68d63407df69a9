//! Linear layers: every use of a model's matrices, forward and backward.

mod apart;
mod deferred;
mod fp8;
mod rows;

use crate::adapter::{Adapter, OutputColumns};
use crate::fp8::{Fp8Layer, Fp8Products};
use crate::matrix::{WeightMatrix, matrix};
use crate::parameters::{Initial, ParameterId, PartParameters};
use crate::{Activation, DropoutSite, Extent, HeadParts, Pass, Result};
use kernels::operation::{AddBias, BiasBackward, ByColumns, Copy, Matmul};
use kernels::{Init, Kernels};
use memory::{Buffer, Category, DType, In, Out};
use std::ops::Range;
use std::sync::Arc;

/// `y [t, outputs] = x [t, inputs] W^T + b`. The weight may be several parameters, each with some of the outputs. They
/// are computed as one product if they are contiguous in the layout.
#[derive(Clone, Debug)]
pub struct Linear {
    weights: Vec<ParameterId>,
    /// None, or one for each weight.
    biases: Vec<ParameterId>,
    /// Number of inputs.
    pub inputs: usize,
    /// Outputs of each weight.
    outputs: Vec<usize>,
    /// That of weights that are targets of adapters, if some are.
    adapter: Option<Adapter>,
    /// Which layer of its block it is, if its products are in FP8.
    fp8: Option<(Fp8Layer, Arc<Fp8Products>)>,
}

/// One of the weights of a linear layer.
#[derive(Clone, Copy, Debug)]
pub struct LinearPart<'n> {
    /// The name of its module.
    pub name: &'n str,
    /// Its outputs.
    pub outputs: usize,
    /// The parts of heads, where files have its outputs by head.
    pub by_head: Option<HeadParts>,
}

impl<'n> From<(&'n str, usize)> for LinearPart<'n> {
    fn from((name, outputs): (&'n str, usize)) -> LinearPart<'n> {
        LinearPart {
            name,
            outputs,
            by_head: None,
        }
    }
}

impl Linear {
    /// Declares the parameters `name.weight [outputs, inputs]` and, with a bias, `name.bias [outputs]`.
    pub fn declare(
        parameters: &mut PartParameters,
        name: &str,
        [outputs, inputs]: [usize; 2],
        has_bias: bool,
    ) -> Linear {
        Linear::declare_together(parameters, [(name, outputs)], inputs, has_bias)
    }

    /// Declares the parameters of several layers, by name and outputs. All read the same input, and their outputs lie
    /// side by side.
    pub fn declare_together<'n>(
        parameters: &mut PartParameters,
        parts: impl IntoIterator<Item = impl Into<LinearPart<'n>>>,
        inputs: usize,
        has_bias: bool,
    ) -> Linear {
        let mut all = Linear {
            weights: Vec::new(),
            biases: Vec::new(),
            inputs,
            outputs: Vec::new(),
            adapter: None,
            fp8: None,
        };
        let parts: Vec<LinearPart> = parts.into_iter().map(Into::into).collect();
        for part in &parts {
            let LinearPart { name, outputs, .. } = *part;
            let mut own = parameters.by_head(part.by_head);
            let weight = own.linear(&format!("{name}.weight"), [outputs, inputs]);
            all.weights.push(weight);
            all.outputs.push(outputs);
            if has_bias {
                let bias = parameters.vector(&format!("{name}.bias"), outputs, Initial::Zero);
                all.biases.push(bias);
            }
        }
        all.adapter = Adapter::declare(parameters, &parts, inputs);
        all
    }

    /// A layer without a bias that uses a matrix declared elsewhere.
    pub fn tied(weight: ParameterId, [outputs, inputs]: [usize; 2]) -> Linear {
        Linear {
            weights: vec![weight],
            biases: Vec::new(),
            inputs,
            outputs: vec![outputs],
            adapter: None,
            fp8: None,
        }
    }

    /// Number of outputs.
    pub fn outputs(&self) -> usize {
        self.outputs.iter().sum()
    }

    /// Its parameters.
    pub fn parameters(&self) -> Vec<ParameterId> {
        let factors = self.adapter.iter().flat_map(Adapter::parameters);
        let own = self.weights.iter().chain(&self.biases).copied();
        own.chain(factors).collect()
    }

    /// The activation that its adapter keeps, which its stage writes beside the output; none without an adapter.
    pub fn writes(&self) -> Option<(Activation, Extent)> {
        self.adapter.as_ref().map(Adapter::writes)
    }

    /// Where its adapter drops elements of the input.
    pub fn dropout(&self) -> Vec<DropoutSite> {
        self.adapter.iter().flat_map(Adapter::sites).collect()
    }

    /// The activations that its backward pass reads: its input, if a weight or a factor is trained, and what its adapter
    /// keeps.
    pub fn backward_reads(&self, input: Activation) -> Vec<Activation> {
        let kept = self.adapter.as_ref().map(|adapter| adapter.writes().0);
        let input = self.reads_input_backward().then_some(input);
        input.into_iter().chain(kept).collect()
    }

    /// Whether its input is read for a gradient.
    pub(crate) fn reads_input_backward(&self) -> bool {
        self.trains_a_weight() || self.adapter.is_some()
    }

    /// Whether all its matrices are trained as they are, without an adapter.
    fn is_all_trained(&self) -> bool {
        self.adapter.is_none() && self.weights.iter().all(|weight| weight.is_trained())
    }

    fn trains_a_weight(&self) -> bool {
        self.weights.iter().any(|weight| weight.is_trained())
    }

    /// The bias of the only weight, for operations that add it together with other things.
    pub fn bias(&self) -> Option<ParameterId> {
        self.assert_one_weight();
        self.biases.first().copied()
    }

    /// FLOPs of the three products for one token.
    pub fn flops_per_token(&self) -> u64 {
        let of_adapter = self.adapter.as_ref().map_or(0, Adapter::flops_per_token);
        6 * self.inputs as u64 * self.outputs() as u64 + of_adapter
    }

    /// `y = x W^T + b`, with what the adapter adds. Without `y`, only what the adapter keeps is computed, if it is needed.
    ///
    /// # Errors
    /// `ModelError` if the device fails or a lease is refused.
    pub fn forward<'y>(&self, pass: &mut Pass, y: impl Into<Option<Out<'y>>>, x: In) -> Result {
        let mut y = y.into();
        if let Some(y) = &mut y {
            self.base(pass, y.reborrow(), x)?;
        }
        self.adapt(pass, y.map(OutputColumns::whole), x)
    }

    /// Adds what the adapter does to `y`, if there is one and the pass has adapters, and keeps what its backward pass reads.
    fn adapt<'y>(
        &self,
        pass: &mut Pass,
        y: impl IntoIterator<Item = OutputColumns<Out<'y>>>,
        x: In,
    ) -> Result {
        let adapter = self.adapter.as_ref().filter(|_| pass.has_adapters());
        let y = y.into_iter().collect();
        adapter.map_or(Ok(()), |adapter| adapter.forward(pass, y, x))
    }

    /// `y = x W^T + b`.
    fn base(&self, pass: &mut Pass, mut y: Out, x: In) -> Result {
        let kernels = pass.kernels();
        if let Some((layer, _)) = self.fp8_of(pass) {
            let of = (x, &self.biases[..], Init::Overwrite);
            self.forward_fp8(pass, layer, y.reborrow(), of)?;
            return self.add_biases_apart(pass, y);
        }
        if !self.is_one_product(pass) {
            for (part, columns) in self.columns().enumerate() {
                let bias = self.biases.get(part).map(|bias| pass.parameter(*bias));
                let weight = matrix(pass, &self.weights[part..=part])?;
                kernels.run(Matmul {
                    out: y.reborrow().columns(columns),
                    a: x,
                    b: weight.view().t(),
                    bias,
                    init: Init::Overwrite,
                })?;
            }
            return Ok(());
        }
        let converted = self.converted_bias(pass, y.dtype())?;
        let bias = converted.as_ref().map(Buffer::view);
        kernels.run(Matmul {
            out: y.reborrow(),
            a: x,
            b: self.weight(pass)?.view().t(),
            bias: bias.or_else(|| pass.parameters(&self.biases)),
            init: Init::Overwrite,
        })?;
        self.add_biases_apart(pass, y)
    }

    /// The only bias in the type of the output, if it is stored in another: a product adds one of its output's type.
    fn converted_bias(&self, pass: &Pass, dtype: DType) -> Result<Option<Buffer>> {
        let [bias] = self.biases[..] else {
            return Ok(None);
        };
        let x = pass.parameter(bias);
        if x.dtype() == dtype {
            return Ok(None);
        }
        let mut converted = pass.lease(
            Category::Temporary,
            "converted_bias",
            [self.outputs()],
            dtype,
        )?;
        let out = converted.view_mut();
        pass.kernels().run(Copy { out, x })?;
        Ok(Some(converted))
    }

    /// Padding can separate biases even when their weights are contiguous; then the product has added none.
    fn add_biases_apart(&self, pass: &Pass, out: Out) -> Result {
        let is_added = pass.parameters(&self.biases).is_some();
        let apart = self.biases.iter().filter(|_| !is_added);
        let bias = ByColumns::of(apart.map(|bias| pass.parameter(*bias)));
        bias.map_or(Ok(()), |bias| {
            Ok(pass.kernels().run(AddBias { out, bias })?)
        })
    }

    /// `y = residual + x W^T + b`, for a layer of one weight.
    ///
    /// # Errors
    /// As [`Linear::forward`].
    pub fn forward_onto<'y>(
        &self,
        pass: &mut Pass,
        y: impl Into<Option<Out<'y>>>,
        x: In,
        residual: In,
    ) -> Result {
        let bias = self.bias();
        self.add_product(pass, y.into(), x, (bias, Init::Add(residual)))
    }

    /// `y = init + x W^T`, for a layer of one weight, without the bias.
    ///
    /// # Errors
    /// As [`Linear::forward`].
    pub fn product<'y>(
        &self,
        pass: &mut Pass,
        y: impl Into<Option<Out<'y>>>,
        x: In,
        init: Init,
    ) -> Result {
        self.add_product(pass, y.into(), x, (None, init))
    }

    fn add_product(
        &self,
        pass: &mut Pass,
        mut y: Option<Out>,
        x: In,
        (bias, init): (Option<ParameterId>, Init),
    ) -> Result {
        self.assert_one_weight();
        if let (Some(y), Some((layer, _))) = (&mut y, self.fp8_of(pass)) {
            let of = (x, bias.as_slice(), init);
            self.forward_fp8(pass, layer, y.reborrow(), of)?;
        } else if let Some(y) = &mut y {
            pass.kernels().run(Matmul {
                out: y.reborrow(),
                a: x,
                b: self.weight(pass)?.view().t(),
                bias: bias.map(|bias| pass.parameter(bias)),
                init,
            })?;
        }
        self.adapt(pass, y.map(OutputColumns::whole), x)
    }

    /// Both gradients, from the output's gradient `dy`; files that of `input`. The input is released before its
    /// gradient is leased. It is read only if a weight or a factor is trained ([`Linear::backward_reads`]).
    ///
    /// # Errors
    /// As [`Linear::forward`], and as replays of the input.
    pub fn backward(&self, pass: &mut Pass, input: Activation, dy: In) -> Result {
        if let Some((layer, codes)) = self.gradient_codes(pass, dy)? {
            return self.backward_fp8(pass, (layer, input), codes);
        }
        if self.defers(pass) {
            // The caller goes on with the gradient, and may add to it.
            let mut own = pass.temporary("d_deferred", [dy.dims()[0], self.outputs()])?;
            let (out, x) = (own.view_mut(), dy);
            pass.kernels().run(Copy { out, x })?;
            return self.backward_deferring(pass, input, own);
        }
        let through = self.parameter_gradients(pass, input, dy)?;
        let (mut dx, init) = pass.gradient_to_add(input)?;
        self.input_gradient(pass, dx.view_mut(), init, (dy, through))?;
        pass.file_gradient(input, dx);
        Ok(())
    }

    /// As [`Linear::backward`], of a gradient that nobody needs afterwards: it is released once it is codes.
    ///
    /// # Errors
    /// As [`Linear::backward`].
    pub fn backward_of(&self, pass: &mut Pass, input: Activation, dy: Buffer) -> Result {
        let Some((layer, codes)) = self.gradient_codes(pass, dy.view())? else {
            return match self.defers(pass) {
                true => self.backward_deferring(pass, input, dy),
                false => self.backward(pass, input, dy.view()),
            };
        };
        drop(dy);
        self.backward_fp8(pass, (layer, input), codes)
    }

    /// The gradients of its parameters from the output's gradient `dy`. Gives what [`Linear::input_gradient`] takes of
    /// its adapter.
    ///
    /// # Errors
    /// As [`Linear::backward`].
    pub fn parameter_gradients(
        &self,
        pass: &mut Pass,
        input: Activation,
        dy: In,
    ) -> Result<Option<Buffer>> {
        if !self.reads_input_backward() {
            self.add_bias_gradients(pass, dy)?;
            return Ok(None);
        }
        let x = pass.pull(input)?;
        let through = self.gradients_of(pass, &[OutputColumns::whole(dy)], x.view())?;
        pass.release(input, x);
        Ok(through)
    }

    /// As [`Linear::parameter_gradients`], given the input. If the layer has one weight and no bias, its outputs may be in
    /// several tensors.
    pub(crate) fn gradients_of(
        &self,
        pass: &mut Pass,
        dy: &[OutputColumns<In>],
        x: In,
    ) -> Result<Option<Buffer>> {
        match dy {
            [OutputColumns { of, .. }] => self.add_gradient(pass, *of, x)?,
            _ => self.add_gradient_apart(pass, dy, x)?,
        }
        let adapter = self.adapter.as_ref();
        let through = adapter.map(|adapter| adapter.add_gradients(pass, dy, x));
        through.transpose()
    }

    /// `dx = init + dy W`, and what the adapter adds, if [`Linear::parameter_gradients`] gave something of it.
    ///
    /// # Errors
    /// As [`Linear::forward`].
    pub fn input_gradient(
        &self,
        pass: &Pass,
        mut dx: Out,
        init: Init,
        (dy, through): (In, Option<Buffer>),
    ) -> Result {
        self.base_input_gradient(pass, dx.reborrow(), init, dy)?;
        self.adapter_input_gradient(pass, dx, through)
    }

    fn adapter_input_gradient(&self, pass: &Pass, dx: Out, through: Option<Buffer>) -> Result {
        match (&self.adapter, through) {
            (Some(adapter), Some(through)) => adapter.add_input_gradient(pass, dx, through.view()),
            _ => Ok(()),
        }
    }

    fn base_input_gradient(&self, pass: &Pass, mut dx: Out, mut init: Init, dy: In) -> Result {
        if self.is_one_product(pass) {
            return Ok(pass.kernels().run(Matmul {
                out: dx,
                a: dy,
                b: self.weight(pass)?.view(),
                bias: None,
                init,
            })?);
        }
        for (part, columns) in self.columns().enumerate() {
            let weight = matrix(pass, &self.weights[part..=part])?;
            pass.kernels().run(Matmul {
                out: dx.reborrow(),
                a: dy.columns(columns),
                b: weight.view(),
                bias: None,
                init,
            })?;
            init = Init::Accumulate;
        }
        Ok(())
    }

    /// `dW += dy^T x`, `db += ` the sum of the rows of dy, for the parameters that are trained.
    ///
    /// # Errors
    /// As [`Linear::forward`].
    pub fn add_gradient(&self, pass: &mut Pass, dy: In, x: In) -> Result {
        let kernels = pass.kernels();
        self.add_bias_gradients(pass, dy)?;
        for (weights, columns) in self.gradient_products(pass) {
            let dweight = pass.accumulate_joined(weights);
            let dweight = dweight.expect("what is one product lies together, and is trained");
            weight_gradient(kernels, dweight, dy.columns(columns), x)?;
        }
        Ok(())
    }

    /// The products that compute the gradients of its trained weights: the weights of each, and its columns of `y`.
    fn gradient_products(&self, pass: &Pass) -> Vec<(&[ParameterId], Range<usize>)> {
        let are_trained = self.weights.iter().all(|weight| weight.is_trained());
        if are_trained && pass.lie_together(&self.weights) {
            return vec![(&self.weights, 0..self.outputs())];
        }
        let each = self.weights.chunks(1).zip(self.columns());
        each.filter(|(weight, _)| weight[0].is_trained()).collect()
    }

    fn add_bias_gradients(&self, pass: &mut Pass, dy: In) -> Result {
        let (kernels, mut columns) = (pass.kernels(), self.columns());
        let alike = self
            .biases
            .chunk_by(|a, b| a.is_trained() == b.is_trained());
        for biases in alike {
            let own = columns.by_ref().take(biases.len());
            let own = own.reduce(|first, last| first.start..last.end);
            if let Some((out, init)) = pass.accumulate_by_columns(biases) {
                let dy = dy.columns(own.expect("each bias has columns"));
                kernels.run(BiasBackward { out, dy, init })?;
            }
        }
        Ok(())
    }

    /// Whether its weights are computed as one product. This depends only on the layout, so replays and plans decide the
    /// same.
    fn is_one_product(&self, pass: &Pass) -> bool {
        self.weights.len() == 1 || pass.lie_together(&self.weights)
    }

    /// All weights as one matrix, if they are computed as one product.
    fn weight<'p>(&self, pass: &'p Pass) -> Result<WeightMatrix<'p>> {
        matrix(pass, &self.weights)
    }

    /// The columns of `y` that belong to each weight.
    fn columns(&self) -> impl Iterator<Item = Range<usize>> {
        let mut first = 0;
        self.outputs.iter().map(move |outputs| {
            first += outputs;
            first - outputs..first
        })
    }

    fn assert_one_weight(&self) {
        assert_eq!(self.weights.len(), 1, "this is for one weight");
    }
}

/// `dW = init + dy^T x`.
pub(crate) fn weight_gradient(
    kernels: &Kernels,
    (out, init): (Out, Init),
    dy: In,
    x: In,
) -> Result {
    Ok(kernels.run(Matmul {
        out,
        a: dy.t(),
        b: x,
        bias: None,
        init,
    })?)
}
