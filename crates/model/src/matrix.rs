//! Products, and matrices of parameters as they read them.

use crate::parameters::ParameterId;
use crate::{Pass, Result};
use kernels::Init;
use kernels::operation::Matmul;
use memory::{Buffer, In, Out};

/// A matrix in the compute type: as it is stored, or made of what is stored.
pub(crate) enum WeightMatrix<'p> {
    Stored(In<'p>),
    Made(Buffer),
}

impl WeightMatrix<'_> {
    pub(crate) fn view(&self) -> In<'_> {
        match self {
            WeightMatrix::Stored(view) => *view,
            WeightMatrix::Made(buffer) => buffer.view(),
        }
    }
}

/// Matrices of one width, stacked by rows, that lie together in the layout, or the matrices of experts, which are one parameter.
/// If they are stored as codes, they are widened into a temporary, which lives as long as what this returns.
pub(crate) fn matrix<'p>(pass: &'p Pass, ids: &[ParameterId]) -> Result<WeightMatrix<'p>> {
    const TOGETHER: &str = "they lie together";
    if !pass.is_coded(ids[0]) {
        return Ok(WeightMatrix::Stored(pass.parameters(ids).expect(TOGETHER)));
    }
    let mut made = pass.temporary("widened_weight", pass.sizes(ids).expect(TOGETHER))?;
    let mut first = 0;
    for id in ids {
        let rows = pass.sizes(&[*id]).expect(TOGETHER)[0];
        pass.widen(*id, made.view_mut().rows(first..first + rows))?;
        first += rows;
    }
    Ok(WeightMatrix::Made(made))
}

/// `out = init + a b`.
pub(crate) fn product(pass: &Pass, out: Out, (a, b): (In, In), init: Init) -> Result {
    Ok(pass.kernels().run(Matmul {
        out,
        a,
        b,
        bias: None,
        init,
    })?)
}
