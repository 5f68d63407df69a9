//! Adafactor (Shazeer and Stern 2018), as `torch.optim.Adafactor`. The variance of a matrix is kept by rows and
//! columns, and a tensor's step is relative to the size of its weights. `sums.rs` makes its updates.

use crate::moment::{Moment, moment};
use crate::update::{StepNumbers, WholeTensor};
use kernels::MatricesShape;
use kernels::quantise::UNSIGNED;

/// Adafactor's numbers that do not change during a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adafactor {
    /// Exponent of the decay, below 0: at step t, variances move towards the squares by t^beta2_decay.
    pub beta2_decay: f64,
    /// Lower bounds: of a variance's root, and of the mean of the rows' variances.
    pub eps: f64,
    /// Lower bound of the root mean square of weights that a tensor's step is relative to.
    pub least_rms: f64,
    /// Updates with a larger root mean square are scaled down to it.
    pub clip_threshold: f64,
}

impl Default for Adafactor {
    fn default() -> Adafactor {
        Adafactor {
            beta2_decay: -0.8,
            eps: f64::from(f32::EPSILON),
            least_rms: 1e-3,
            clip_threshold: 1.0,
        }
    }
}

/// The variance of vectors, with one element per parameter. Settings never quantise it.
pub(crate) static VARIANCE: [Moment; 1] = [moment!("variance", UNSIGNED)];

/// Adafactor for tensors that keep their variance in the same form.
pub(crate) struct AdafactorGroup {
    pub(crate) numbers: Adafactor,
    /// Whether the variance is kept by rows and columns, rather than one per element.
    pub(crate) is_factored: bool,
}

impl AdafactorGroup {
    /// The rate of the variances, the largest step, and the learning rate.
    pub(crate) fn rates(&self, step: &StepNumbers) -> [f64; 3] {
        let update = step.update as f64;
        [
            update.powf(self.numbers.beta2_decay),
            step.learning_rate.min(1.0 / update.sqrt()),
            step.learning_rate,
        ]
    }
}

/// The rows and columns by which a tensor's variance is kept.
pub(crate) fn shape(tensor: &WholeTensor) -> MatricesShape {
    let [rows, columns] = tensor.shape;
    MatricesShape {
        matrices: tensor.count,
        rows,
        columns,
    }
}
