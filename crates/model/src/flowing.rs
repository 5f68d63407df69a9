//! Gradients of activations in the backward pass, from the stages that read an activation to the stage that wrote it.

use crate::pass::Pass;
use crate::{Activation, LayerActivation, Result};
use kernels::Init;
use memory::Buffer;

impl Pass<'_> {
    /// Takes the gradient of an activation that the stage wrote.
    ///
    /// # Panics
    /// If no later stage filed one.
    pub fn gradient(&mut self, of: Activation) -> Buffer {
        let at = self.of_block(of);
        let gradient = self.take_gradient(at);
        let (gradient, _) = gradient.unwrap_or_else(|| panic!("nobody filed the gradient of {at}"));
        gradient
    }

    /// The gradient of an activation that the stage read, and how to add to it: onto what other stages filed, or over a
    /// fresh lease.
    ///
    /// # Errors
    /// [`ModelError::OutOfMemory`](crate::ModelError::OutOfMemory) if the lease is refused.
    pub fn gradient_to_add(&mut self, of: Activation) -> Result<(Buffer, Init<'static>)> {
        let at = self.of_block(of);
        if let Some(gradient) = self.take_gradient(at) {
            return Ok(gradient);
        }
        let is_within = self.is_within(at);
        let extent = self.model.architecture().extent(at);
        let (dims, _) = extent.resolve(self.shape_of(at), self.dtype());
        let gradient = self.temporary(of.gradient_name(), dims)?;
        let gradient = match &mut self.own_mut().tiles {
            Some(tiles) if !is_within => tiles.lend_gradient(at, gradient, Init::Overwrite),
            _ => gradient,
        };
        Ok((gradient, Init::Overwrite))
    }

    /// Files the gradient of an activation that the stage read.
    ///
    /// # Panics
    /// If one is filed already: take that by [`Pass::gradient_to_add`], and add to it.
    pub fn file_gradient(&mut self, of: Activation, gradient: Buffer) {
        let at = self.of_block(of);
        match &mut self.own_mut().tiles {
            Some(tiles) => tiles.file_gradient(at, gradient),
            None => self.file_gradient_at(at, gradient),
        }
    }

    pub(crate) fn file_gradient_at(&mut self, at: LayerActivation, gradient: Buffer) {
        let is_first = self.own().flowing.iter().all(|(other, _)| *other != at);
        assert!(is_first, "the gradient of {at} is there already");
        self.own_mut().flowing.push((at, gradient));
    }

    /// Takes the gradient of a block's input.
    ///
    /// # Panics
    /// As [`Pass::gradient`].
    pub(crate) fn gradient_of_input(&mut self, layer: usize) -> Buffer {
        let at = LayerActivation::input_of(layer);
        let gradient = self.take_gradient(at);
        gradient.map_or_else(
            || panic!("nobody filed the gradient of {at}"),
            |(gradient, _)| gradient,
        )
    }

    /// Takes the filed gradient of an activation, or a tile's rows of it.
    fn take_gradient(&mut self, at: LayerActivation) -> Option<(Buffer, Init<'static>)> {
        if let Some(gradient) = self
            .own_mut()
            .tiles
            .as_mut()
            .and_then(|tiles| tiles.gradient(at))
        {
            return Some(gradient);
        }
        let found = self
            .own()
            .flowing
            .iter()
            .position(|(other, _)| *other == at)?;
        let whole = self.own_mut().flowing.swap_remove(found).1;
        let gradient = match &mut self.own_mut().tiles {
            Some(tiles) => tiles.lend_gradient(at, whole, Init::Accumulate),
            None => whole,
        };
        Some((gradient, Init::Accumulate))
    }

    /// Whether no filed gradient is left.
    pub(crate) fn gradients_are_taken(&self) -> bool {
        self.own().flowing.is_empty()
    }
}
