//! Copies of a parameter's gradient and optimizer states.

use crate::Result;
use crate::error::SessionError;
use crate::read_back::widened;
use crate::session::Session;
use kernels::{Copy, Queue};
use memory::{DType, In, Out};
use std::ops::Range;

/// A copy of one of a parameter's optimizer states.
#[derive(Clone, Debug)]
pub struct NamedStateCopy {
    /// The name of the state without the parameter's, as in [`optim::NamedState`], such as `first_moment`.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Little-endian elements, in the order of the parameter's values.
    pub bytes: Vec<u8>,
}

impl Session {
    /// The gradient of one parameter over the last step, before clipping, widened to f32.
    ///
    /// # Errors
    /// [`SessionError::Kernel`] if the device fails, [`SessionError::Released`] if the gradient is gone,
    /// [`SessionError::Frozen`] if the parameter has none.
    pub fn gradient(&self, index: usize) -> Result<Vec<f32>> {
        let elements = self.model.layout().entries()[index].elements();
        self.gradient_of(index, 0..elements)
    }

    /// The same for some of its elements.
    pub(crate) fn gradient_of(&self, index: usize, elements: Range<usize>) -> Result<Vec<f32>> {
        let layout = self.model.layout();
        self.check_has_gradient(index)?;
        let first = layout.entries()[index].offset;
        let range = first + elements.start..first + elements.end;
        Ok(widened(self.gradients.dtype(), range.len(), |bytes| {
            self.gradients.read(&*self.kernels, &range, bytes)
        })?)
    }

    /// An error if a parameter has no gradient between steps.
    fn check_has_gradient(&self, index: usize) -> Result {
        let layout = self.model.layout();
        let entry = &layout.entries()[index];
        if !entry.role.is_trained() {
            return Err(SessionError::Frozen(entry.name.clone()));
        }
        if self.gradients.is_released() && layout.unit_of(index).is_some() {
            return Err(SessionError::Released);
        }
        Ok(())
    }

    /// Copies the values of one parameter, as f32, to memory of the device: within the device if they are there, else
    /// through the host.
    ///
    /// # Errors
    /// [`SessionError::Kernel`] if the device fails.
    pub fn copy_parameter(&self, index: usize, out: Out) -> Result {
        let range = self.weights.layout().entries()[index].range();
        match self.weights.on_device(&range) {
            Some(x) => self.copy(out, x),
            None => self.send(out, &self.parameter(index)?),
        }
    }

    /// The values of one parameter where they lie on the device, with nothing under way that writes them; none if they live in host memory or are
    /// stored as codes. The last step must be finished.
    ///
    /// # Errors
    /// [`SessionError::Kernel`] if the device fails.
    pub fn parameter_in_place(&self, index: usize) -> Result<Option<In<'_>>> {
        self.kernels.finish(self.kernels.record(Queue::Compute)?)?;
        let range = self.weights.layout().entries()[index].range();
        Ok(self.weights.on_device(&range))
    }

    /// Copies the values of [`Session::gradient`] in the same way.
    ///
    /// # Errors
    /// As [`Session::gradient`].
    pub fn copy_gradient(&self, index: usize, out: Out) -> Result {
        let range = self.model.layout().entries()[index].range();
        self.check_has_gradient(index)?;
        match self.gradients.on_host(&range) {
            None => self.copy(out, self.gradients.flat(&range)),
            Some(_) => self.send(out, &self.gradient(index)?),
        }
    }

    fn copy(&self, out: Out, x: In) -> Result {
        let out = out.reshape([x.elements()]);
        Ok(self.kernels.run(Copy { out, x })?)
    }

    fn send(&self, out: Out, values: &[f32]) -> Result {
        Ok(self.kernels.upload(out, bytemuck::cast_slice(values))?)
    }

    /// The optimizer states of one parameter, in this run's formats; none if it is not trained. The last step must be
    /// finished.
    ///
    /// # Errors
    /// [`SessionError::Kernel`] if the device fails.
    pub fn states(&self, index: usize) -> Result<Vec<NamedStateCopy>> {
        let parameter = &self.model.layout().entries()[index];
        let range = parameter.range();
        let is_trained = parameter.role.is_trained();
        let states = is_trained.then(|| self.optimizer.named_states(index, &range));
        let copies = states.into_iter().flatten().map(|state| {
            let dtype = state.dtype;
            let mut bytes = vec![0; state.bytes()];
            state.read(&*self.kernels, &mut bytes)?;
            let name = state.name[parameter.name.len() + 1..].to_string();
            Ok(NamedStateCopy { name, dtype, bytes })
        });
        copies.collect()
    }
}
