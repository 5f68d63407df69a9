//! Linear layers: all that a matrix of the model is used for, in both directions.

use crate::parameters::{Initial, ParameterId, PartParameters};
use crate::{ModelError, Pass};
use kernels::Init;
use kernels::operation::{AddBias, BiasBackward, Matmul};
use memory::{In, Out};
use std::ops::Range;

/// `y [t, outputs] = x [t, inputs] W^T + b`, or some of the outputs of one.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: ParameterId,
    bias: Option<ParameterId>,
    inputs: usize,
    /// Rows of the weight.
    rows: Range<usize>,
}

impl Linear {
    /// Declares the parameters `name.weight [outputs, inputs]` and, where it has one, `name.bias [outputs]`.
    pub fn declare(
        parameters: &mut PartParameters,
        name: &str,
        [outputs, inputs]: [usize; 2],
        has_bias: bool,
    ) -> Linear {
        let weight = parameters.matrix(&format!("{name}.weight"), [outputs, inputs]);
        let mut bias = || parameters.vector(&format!("{name}.bias"), outputs, Initial::Zero);
        Linear {
            weight,
            bias: has_bias.then(&mut bias),
            inputs,
            rows: 0..outputs,
        }
    }

    /// One that uses a matrix that is there already, without a bias.
    pub fn tied(weight: ParameterId, [outputs, inputs]: [usize; 2]) -> Linear {
        Linear {
            weight,
            bias: None,
            inputs,
            rows: 0..outputs,
        }
    }

    /// Some outputs of it. What splits a linear layer adds the parts' gradients by one call of
    /// [`Linear::add_gradients`].
    pub fn part(&self, outputs: Range<usize>) -> Linear {
        let first = self.rows.start;
        Linear {
            rows: first + outputs.start..first + outputs.end,
            ..self.clone()
        }
    }

    /// Number of outputs.
    pub fn outputs(&self) -> usize {
        self.rows.len()
    }

    /// Number of inputs.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Its parameters.
    pub fn parameters(&self) -> Vec<ParameterId> {
        [self.weight].into_iter().chain(self.bias).collect()
    }

    /// The bias, for operations that add it along with other things.
    pub fn bias(&self) -> Option<ParameterId> {
        self.bias
    }

    /// FLOPs of the three products for one token.
    pub fn flops_per_token(&self) -> u64 {
        6 * self.inputs as u64 * self.outputs() as u64
    }

    /// `y = x W^T + b`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if the device fails.
    pub fn forward(&self, pass: &Pass, mut y: Out, x: In) -> Result<(), ModelError> {
        self.product(pass, y.reborrow(), x, Init::Overwrite)?;
        if let Some(bias) = self.bias {
            let bias = pass.parameter(bias).rows(self.rows.clone());
            pass.kernels().run(AddBias { out: y, bias })?;
        }
        Ok(())
    }

    /// `y = init + x W^T`, without the bias.
    ///
    /// # Errors
    /// As [`Linear::forward`].
    pub fn product(&self, pass: &Pass, y: Out, x: In, init: Init) -> Result<(), ModelError> {
        let b = self.weight(pass).t();
        Ok(pass.kernels().run(Matmul {
            out: y,
            a: x,
            b,
            init,
        })?)
    }

    /// `dx = init + dy W`.
    ///
    /// # Errors
    /// As [`Linear::forward`].
    pub fn input_gradient(
        &self,
        pass: &Pass,
        dx: Out,
        init: Init,
        dy: In,
    ) -> Result<(), ModelError> {
        let b = self.weight(pass);
        Ok(pass.kernels().run(Matmul {
            out: dx,
            a: dy,
            b,
            init,
        })?)
    }

    /// `dW += dy^T x`, `db += ` the sum of the rows of dy.
    ///
    /// # Errors
    /// As [`Linear::forward`].
    pub fn add_gradient(&self, pass: &mut Pass, dy: In, x: In) -> Result<(), ModelError> {
        Linear::add_gradients(pass, &[(self, dy)], x)
    }

    /// The same for several that read the same; parts of one linear layer stand side by side.
    ///
    /// # Errors
    /// As [`Linear::forward`].
    pub fn add_gradients(
        pass: &mut Pass,
        parts: &[(&Linear, In)],
        x: In,
    ) -> Result<(), ModelError> {
        let kernels = pass.kernels();
        for parts in parts.chunk_by(|(a, _), (b, _)| a.weight == b.weight) {
            let linear = parts[0].0;
            if let Some(bias) = linear.bias {
                let (mut dbias, init) = pass.accumulate(bias);
                for (part, dy) in parts {
                    let out = dbias.reborrow().rows(part.rows.clone());
                    kernels.run(BiasBackward { out, dy: *dy, init })?;
                }
            }
            let (mut dweight, init) = pass.accumulate(linear.weight);
            for (part, dy) in parts {
                kernels.run(Matmul {
                    out: dweight.reborrow().rows(part.rows.clone()),
                    a: dy.t(),
                    b: x,
                    init,
                })?;
            }
        }
        Ok(())
    }

    fn weight<'p>(&self, pass: &'p Pass) -> In<'p> {
        pass.parameter(self.weight).rows(self.rows.clone())
    }
}
