//! A few rows of a linear layer's weight at a time, as decoding uses the matrix of latents, head by head. The layer has one
//! weight and no bias.

use super::Linear;
use crate::matrix::{WeightMatrix, product};
use crate::{Pass, Result};
use kernels::Init;
use memory::{In, Out};
use std::ops::Range;

/// A layer's matrix `W`, and the factors of its adapter, A with the scale, if it has one and the pass has adapters.
pub(crate) struct LinearRows<'p> {
    weight: WeightMatrix<'p>,
    factors: Option<[WeightMatrix<'p>; 2]>,
}

impl Linear {
    /// Its matrix, to be used by rows.
    pub(crate) fn rows<'p>(&self, pass: &'p Pass) -> Result<LinearRows<'p>> {
        let adapter = self.adapter.as_ref().filter(|_| pass.has_adapters());
        let factors = adapter.map(|adapter| adapter.factors(pass));
        Ok(LinearRows {
            weight: self.weight(pass)?,
            factors: factors.transpose()?,
        })
    }
}

impl LinearRows<'_> {
    /// `out = x W^T`, with some rows of `W`.
    pub(crate) fn forward(&self, pass: &Pass, out: Out, x: In, rows: Range<usize>) -> Result {
        let factors = self.factors.as_ref().map(|[a, b]| {
            let b = b.view().rows(rows.clone());
            [a.view().t(), b.t()]
        });
        let weight = self.weight.view().rows(rows.clone()).t();
        multiply(pass, out, x, (weight, factors))
    }

    /// `out = x W`, with some rows of `W`.
    pub(crate) fn by_columns(&self, pass: &Pass, out: Out, x: In, rows: Range<usize>) -> Result {
        let factors = self.factors.as_ref().map(|[a, b]| {
            let b = b.view().rows(rows.clone());
            [b, a.view()]
        });
        let weight = self.weight.view().rows(rows.clone());
        multiply(pass, out, x, (weight, factors))
    }
}

/// `out = x weight`, and with factors `+ (x first) second`.
fn multiply(pass: &Pass, mut out: Out, x: In, (weight, factors): (In, Option<[In; 2]>)) -> Result {
    product(pass, out.reborrow(), (x, weight), Init::Overwrite)?;
    let Some([first, second]) = factors else {
        return Ok(());
    };
    let mut through = pass.temporary("lora_rows", [x.dims()[0], first.dims()[1]])?;
    product(pass, through.view_mut(), (x, first), Init::Overwrite)?;
    product(pass, out, (through.view(), second), Init::Accumulate)
}
