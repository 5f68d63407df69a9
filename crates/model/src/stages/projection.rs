//! Linear layers that read one activation and write one each.

use crate::stage::{Io, Stage};
use crate::{Activation, Extent, Linear, ModelError, ParameterId, Pass};
use kernels::Init;

/// Each output `[b s, f]` = input W^T + b: gate and up, or the first product of a feed-forward layer without a gate.
pub struct Projections {
    /// The name in reports.
    pub name: &'static str,
    /// What is projected.
    pub input: Activation,
    /// What comes of it, by which linear layer.
    pub outputs: Vec<(Activation, Linear)>,
}

impl Stage for Projections {
    fn name(&self) -> &'static str {
        self.name
    }

    fn io(&self) -> Io {
        let outputs = self.outputs.iter();
        let extent = |linear: &Linear| Extent::tokens(linear.outputs());
        Io {
            reads: vec![self.input],
            writes: outputs
                .map(|(output, linear)| (*output, extent(linear)))
                .collect(),
            backward_reads: vec![self.input],
        }
    }

    fn parameters(&self) -> Vec<ParameterId> {
        let linears = self.outputs.iter().map(|(_, linear)| linear);
        linears.flat_map(Linear::parameters).collect()
    }

    fn flops_per_token(&self, _seq: usize) -> u64 {
        let linears = self.outputs.iter().map(|(_, linear)| linear);
        linears.map(Linear::flops_per_token).sum()
    }

    fn is_by_token(&self) -> bool {
        true
    }

    fn forward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let x = pass.pull(self.input)?;
        for (output, linear) in &self.outputs {
            let mut y = pass.output(*output)?;
            if let Some(y) = &mut y {
                linear.forward(pass, y.view_mut(), x.view())?;
            }
            pass.put(*output, y);
        }
        Ok(())
    }

    fn backward(&self, pass: &mut Pass) -> Result<(), ModelError> {
        let outputs = self.outputs.iter();
        let with_gradient = outputs.map(|(output, linear)| (linear, pass.gradient(*output)));
        let gradients: Vec<_> = with_gradient.collect();
        let x = pass.pull(self.input)?;
        let parts: Vec<_> = gradients
            .iter()
            .map(|(linear, dy)| (*linear, dy.view()))
            .collect();
        Linear::add_gradients(pass, &parts, x.view())?;
        pass.release(self.input, x);
        let (mut dx, mut init) = pass.gradient_to_add(self.input)?;
        for (linear, dy) in gradients {
            linear.input_gradient(pass, dx.view_mut(), init, dy.view())?;
            init = Init::Accumulate;
        }
        pass.file_gradient(self.input, dx);
        Ok(())
    }
}
