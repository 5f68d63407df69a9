//! Matrices of parameters as products read them.

use crate::parameters::ParameterId;
use crate::{ModelError, Pass};
use memory::{Buffer, In};

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

/// Matrices of one width, stacked by rows, that lie together in the layout. If they are stored as codes, they are widened
/// into a temporary, which lives as long as what this returns.
pub(crate) fn matrix<'p>(
    pass: &'p Pass,
    ids: &[ParameterId],
) -> Result<WeightMatrix<'p>, ModelError> {
    if !pass.is_coded(ids[0]) {
        let stored = pass.parameters(ids);
        return Ok(WeightMatrix::Stored(stored.expect("they lie together")));
    }
    let shapes = ids.iter().map(|id| pass.sizes(*id));
    let shapes: Vec<[usize; 2]> = shapes.collect();
    let rows = shapes.iter().map(|[rows, _]| rows).sum();
    let mut made = pass.temporary("widened_weight", [rows, shapes[0][1]])?;
    let mut first = 0;
    for (id, [rows, _]) in ids.iter().zip(shapes) {
        pass.widen(*id, made.view_mut().rows(first..first + rows))?;
        first += rows;
    }
    Ok(WeightMatrix::Made(made))
}
