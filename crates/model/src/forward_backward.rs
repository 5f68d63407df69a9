//! A micro-batch through the whole model: embedding, blocks, head, and back.

use crate::architecture::Position;
use crate::pass::{Pass, Work};
use crate::stages::Loss;
use crate::{Activation, LayerActivation, Model, ModelError, Purpose, ReplayCounts};
use kernels::Init;
use memory::{Buffer, Layer, Phase};

/// What the micro-batches of one step add up.
pub struct StepTotals<'a> {
    /// `[1]` f32: sum of the losses of all targets so far.
    pub loss: &'a mut Buffer,
    /// Replays so far.
    pub replayed: &'a mut ReplayCounts,
    /// Whether nothing has been added yet.
    pub is_first: bool,
    /// Gradients are multiplied by this: 1 / targets of the whole step.
    pub gradient_scale: f32,
}

impl Model {
    /// Forward and backward of one micro-batch: adds its loss to the totals and its gradients to those of `work`.
    ///
    /// # Errors
    /// [`ModelError`] if a lease is refused; the step is then lost, the parameters are not. Copies that were under way
    /// are done when it returns.
    pub fn forward_backward<'a>(
        &'a self,
        work: Work<'a>,
        totals: &mut StepTotals,
    ) -> Result<(), ModelError> {
        let mut pass = Pass::new(self, work);
        let outcome = pass.forward_backward(totals);
        totals.replayed.add_all(&pass.replayed);
        if outcome.is_err() {
            pass.work.saved.abandon(pass.work.kernels)?;
        }
        outcome
    }
}

impl Pass<'_> {
    fn forward_backward(&mut self, totals: &mut StepTotals) -> Result<(), ModelError> {
        self.forward()?;
        self.head(totals)?;
        self.work.purpose.training().beside.before_backward()?;
        self.backward()?;
        totals.is_first = false;
        assert!(
            self.work.saved.is_empty(),
            "every activation is released by the last stage that needs it"
        );
        assert!(
            self.gradients_are_taken(),
            "every gradient of an activation is taken by the stage that wrote it"
        );
        Ok(())
    }

    /// Embedding and all blocks; leaves the head's input in the table.
    pub(crate) fn forward(&mut self) -> Result<(), ModelError> {
        let phase = self.work.purpose.forward_phase();
        {
            let _place = self.enter(phase, Layer::Embedding);
            self.before_forward(Layer::Embedding)?;
            self.forward_stage(Position::EMBEDDING)?;
        }
        for (layer, block) in self.model.architecture().blocks().iter().enumerate() {
            let _place = self.enter(phase, Layer::Block(layer));
            self.before_forward(Layer::Block(layer))?;
            for stage in 0..block.stages().len() {
                self.forward_stage(Position::new(layer, stage))?;
            }
            if let Some(before) = layer.checked_sub(1) {
                self.work.saved.give_back_left(self.work.kernels, before)?;
            }
        }
        Ok(())
    }

    fn before_forward(&mut self, part: Layer) -> Result<(), ModelError> {
        self.go_on()?;
        let work = &mut self.work;
        match &mut work.purpose {
            Purpose::Training(training) => {
                let gradients = training.gradients.arena();
                let beside = &mut training.beside;
                Ok(beside.before_forward(part, work.parameters, gradients)?)
            }
            Purpose::Inference(_) => Ok(()),
        }
    }

    /// Breaks the micro-batch off if that is asked for.
    fn go_on(&self) -> Result<(), ModelError> {
        match &self.work.purpose {
            Purpose::Training(training) if training.beside.is_stopped() => Err(ModelError::Stopped),
            _ => Ok(()),
        }
    }

    /// Takes the head's input out of the table.
    pub(crate) fn take_head_input(&mut self) -> Buffer {
        self.allow(self.model.architecture().head_parameters());
        self.work.saved.take(self.head_input())
    }

    fn head_input(&self) -> LayerActivation {
        LayerActivation {
            layer: self.model.layers(),
            activation: Activation::X,
        }
    }

    /// The head, forward and backward; files the gradient of its input.
    fn head(&mut self, totals: &mut StepTotals) -> Result<(), ModelError> {
        let _place = self.enter(Phase::Forward, Layer::Head);
        self.before_forward(Layer::Head)?;
        let x = self.take_head_input();
        let init = match totals.is_first {
            true => Init::Overwrite,
            false => Init::Accumulate,
        };
        let loss = Loss {
            sum: totals.loss.view_mut(),
            init,
            gradient_scale: totals.gradient_scale,
        };
        let (head, chunk) = (self.model.architecture().head(), self.model.head_chunk());
        let dx = head.loss_and_gradient(self, x, chunk, loss)?;
        self.file_gradient_at(self.head_input(), dx);
        Ok(())
    }

    /// All backward passes, from the gradient of the head's input to the embedding's.
    fn backward(&mut self) -> Result<(), ModelError> {
        for (layer, block) in self.model.architecture().blocks().iter().enumerate().rev() {
            let _place = self.enter(Phase::Backward, Layer::Block(layer));
            self.go_on()?;
            if let Some(next) = layer.checked_sub(1) {
                self.fetch_block(next)?;
            }
            for stage in (0..block.stages().len()).rev() {
                self.backward_stage(Position::new(layer, stage))?;
            }
        }
        let _place = self.enter(Phase::Backward, Layer::Embedding);
        self.backward_stage(Position::EMBEDDING)
    }

    /// Starts everything that a block has on the host on its way back, what its backward pass reads first first: at
    /// the start of the backward pass of the block after it, so that the copies have as long.
    fn fetch_block(&mut self, layer: usize) -> Result<(), ModelError> {
        let block = &self.model.architecture().blocks()[layer];
        let work = &mut self.work;
        for declared in block.stages().iter().rev() {
            for activation in &declared.io.backward_reads {
                let at = LayerActivation {
                    layer,
                    activation: *activation,
                };
                if work.saved.is_away(at) {
                    work.saved
                        .fetch(work.memory, work.kernels, at, work.batch.shape)?;
                }
            }
        }
        Ok(())
    }
}
