//! Weights that others read where they lie.

use super::Trainer;
use crate::failure::Result;
use memory::DType;
use model::MatrixOrder;
use settings::Device;

/// Where a parameter lies.
#[derive(Clone, Debug)]
pub struct WeightInPlace {
    /// Its first element.
    pub pointer: *const u8,
    /// The number of the GPU that has it; none: it is the host's memory.
    pub gpu: Option<usize>,
    /// Element type.
    pub dtype: DType,
    /// Its shape in Hugging Face's files.
    pub shape: Vec<usize>,
    /// How many elements further the next one of each dimension is.
    pub strides: Vec<usize>,
}

impl Trainer {
    /// Where a parameter lies; none if only a copy can be given: it is on the host, stored as codes, or in another order than in files.
    /// It stays there until the trainer sleeps or ends, and steps change it.
    ///
    /// # Errors
    /// As [`Trainer::parameter`].
    pub fn weight_in_place(&mut self, name: &str) -> Result<Option<WeightInPlace>> {
        self.enter()?;
        self.session.awake_mut()?.finish_step()?;
        let (index, parameter) = self.find(name)?;
        let Some(values) = self.session.awake()?.parameter_in_place(index)? else {
            return Ok(None);
        };
        let shape = parameter.stored_shape();
        let strides = match parameter.turned() {
            None => row_major(&shape),
            Some(turned)
                if (turned.matrices, turned.order) == (1, MatrixOrder::Same)
                    && turned.rows == [1, shape[1], 1]
                    && turned.columns == [1, shape[0], 1] =>
            {
                vec![1, shape[0]]
            }
            Some(_) => return Ok(None),
        };
        Ok(Some(WeightInPlace {
            pointer: values.pointer(),
            gpu: match self.config.device() {
                Device::Cpu => None,
                Device::Cuda { index } => Some(index),
            },
            dtype: values.dtype(),
            shape,
            strides,
        }))
    }
}

fn row_major(shape: &[usize]) -> Vec<usize> {
    let behind = |dimension: usize| shape[dimension + 1..].iter().product();
    (0..shape.len()).map(behind).collect()
}
