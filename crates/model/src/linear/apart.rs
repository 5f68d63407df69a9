//! A linear layer of one weight, without a bias, whose outputs are several tensors side by side.

use super::{Linear, weight_gradient};
use crate::adapter::OutputColumns;
use crate::matrix::product;
use crate::{Pass, Result};
use kernels::Init;
use memory::{Buffer, In, Out};

impl Linear {
    /// As [`Linear::forward`], into each of these tensors.
    pub(crate) fn forward_apart(
        &self,
        pass: &mut Pass,
        mut y: Vec<OutputColumns<Out>>,
        x: In,
    ) -> Result {
        self.assert_one_weight();
        if !y.is_empty() {
            let weight = self.weight(pass)?;
            for OutputColumns { first, of } in &mut y {
                let rows = *first..*first + of.dims()[1];
                let weight = weight.view().rows(rows).t();
                product(pass, of.reborrow(), (x, weight), Init::Overwrite)?;
            }
        }
        self.adapt(pass, y, x)
    }

    /// As [`Linear::add_gradient`], from each of these tensors.
    pub(super) fn add_gradient_apart(
        &self,
        pass: &mut Pass,
        dy: &[OutputColumns<In>],
        x: In,
    ) -> Result {
        self.assert_one_weight();
        let kernels = pass.kernels();
        let Some((mut dweight, init)) = pass.accumulate(self.weights[0]) else {
            return Ok(());
        };
        for OutputColumns { first, of } in dy {
            let rows = *first..*first + of.dims()[1];
            weight_gradient(kernels, (dweight.reborrow().rows(rows), init), *of, x)?;
        }
        Ok(())
    }

    /// As [`Linear::input_gradient`], from each of these tensors.
    pub(crate) fn input_gradient_apart(
        &self,
        pass: &Pass,
        mut dx: Out,
        mut init: Init,
        (dy, through): (&[OutputColumns<In>], Option<Buffer>),
    ) -> Result {
        self.assert_one_weight();
        let weight = self.weight(pass)?;
        for OutputColumns { first, of } in dy {
            let rows = *first..*first + of.dims()[1];
            product(pass, dx.reborrow(), (*of, weight.view().rows(rows)), init)?;
            init = Init::Accumulate;
        }
        drop(weight);
        self.adapter_input_gradient(pass, dx, through)
    }
}
