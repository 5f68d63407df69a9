//! Fills a model's weights, from files or freshly.

use crate::Result;
use kernels::Kernels;
use memory::Layout;
use model::{
    DrawingOrder, Fresh, LeftOut, Model, ParameterPart, Parameters, import, import_adapter,
    initialise, initialise_factors,
};
use optim::{Optimizer, weight_bytes};
use std::path::Path;
use units::Weights;

/// Fills the weights of a model.
pub struct IncomingWeights<'a> {
    pub(crate) model: &'a Model,
    pub(crate) kernels: &'a Kernels,
    pub(crate) weights: &'a mut Weights,
    /// In training: it may have masters of the weights.
    pub(crate) optimizer: Option<&'a mut Optimizer>,
}

impl<'a> IncomingWeights<'a> {
    /// Sets values, beginning at an element of the arena, rounded as training rounds them, and their masters if there are any.
    ///
    /// # Errors
    /// [`SessionError::Kernel`](crate::SessionError::Kernel) if the device fails.
    pub fn set_values(&mut self, offset: usize, values: &[f32]) -> Result {
        if let Some(optimizer) = &mut self.optimizer {
            return Ok(optimizer.set_weights(self.kernels, self.weights, offset, values)?);
        }
        let range = offset..offset + values.len();
        let bytes = weight_bytes(self.weights.dtype_of(&range), values);
        Ok(self.weights.store(self.kernels, range, &bytes)?)
    }

    /// Loads the weights from a folder in Hugging Face layout. Gives what was left out because it is no part of the model
    /// ([`model::ModelWeights::left_out`]).
    ///
    /// # Errors
    /// [`SessionError::Weights`](crate::SessionError::Weights) if a tensor is missing or has another shape.
    pub fn import(&mut self, folder: &Path) -> Result<Option<LeftOut>> {
        let wanted = self.weights.to_set();
        let (parameters, layout) = self.declared();
        import(folder, parameters, layout, &wanted, |part| match part {
            ParameterPart::Values(offset, values) => self.set_values(offset, values),
            ParameterPart::Codes(entry, bytes) => {
                Ok(self.weights.store_codes(self.kernels, entry, &bytes)?)
            }
        })
    }

    /// Fills the factors of adapters from a folder as PEFT writes it.
    ///
    /// # Errors
    /// As [`IncomingWeights::import`].
    pub fn import_adapter(&mut self, folder: &Path) -> Result {
        let held = self.weights.held();
        let (parameters, layout) = self.declared();
        import_adapter(folder, parameters, layout, &held, |offset, values| {
            self.set_values(offset, values)
        })
    }

    /// Fills the model with fresh weights.
    ///
    /// # Errors
    /// [`SessionError::Kernel`](crate::SessionError::Kernel) if the device fails.
    pub fn initialise(&mut self, fresh: Fresh) -> Result {
        let order = self.drawing_order();
        let (parameters, layout) = self.declared();
        initialise(parameters, layout, fresh, order, |offset, values| {
            self.set_values(offset, values)
        })
    }

    /// Fills the factors of adapters freshly.
    ///
    /// # Errors
    /// As [`IncomingWeights::initialise`].
    pub fn initialise_factors(&mut self, fresh: Fresh) -> Result {
        let order = self.drawing_order();
        let (parameters, layout) = self.declared();
        initialise_factors(parameters, layout, fresh, order, |offset, values| {
            self.set_values(offset, values)
        })
    }

    fn declared(&self) -> (&'a Parameters, &'a Layout) {
        (&self.model.architecture().parameters, self.model.layout())
    }

    /// The order in which fresh values are set: masters may be in a file.
    fn drawing_order(&self) -> DrawingOrder {
        let optimizer = self.optimizer.as_deref();
        match optimizer.and_then(Optimizer::disk_bytes) {
            Some(_) => DrawingOrder::Layout,
            None => DrawingOrder::Any,
        }
    }
}
