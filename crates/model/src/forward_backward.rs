//! One micro-batch through the whole model, forward and backward: embedding, blocks, head.

use crate::pass::{Pass, Work};
use crate::position::StagePosition;
use crate::{LayerActivation, Model, ModelError, Purpose, ReplayCounts, Result};
use memory::{Buffer, Layer, Phase};
use units::OpenUnit;

impl Model {
    /// Forward and backward of one micro-batch. Adds its loss and gradients to those in `work`, and its replays to
    /// those counted so far. In the last stage of a pipeline, the table has the first block's input already
    /// ([`crate::SavedActivations::receive`]), and what is returned is that input's gradient, if the stage before needs it.
    ///
    /// # Errors
    /// [`ModelError`] if a lease is refused or the device fails. The step is then lost, the parameters are not. Copies
    /// under way have ended when it returns.
    pub fn forward_backward<'a>(
        &'a self,
        work: Work<'a>,
        replayed: &mut ReplayCounts,
    ) -> Result<Option<Buffer>> {
        let mut pass = Pass::new(self, work);
        let outcome = pass.forward_and_backward();
        pass.ended(outcome, replayed)
    }

    /// The forward pass of one micro-batch through a stage of a pipeline that is not the last: returns the last block's output
    /// `[b s, h]`. What the policy keeps stays in the table.
    ///
    /// # Errors
    /// As [`Model::forward_backward`].
    pub fn forward_on_pipeline_stage<'a>(&'a self, work: Work<'a>) -> Result<Buffer> {
        let mut pass = Pass::new(self, work);
        let outcome = pass.forward().and_then(|()| {
            let output = pass.work.saved.take(pass.output_of_stage());
            let work = &mut pass.work;
            work.weights.end_pass(work.kernels)?;
            Ok(output)
        });
        pass.ended(outcome, &mut self.no_replays())
    }

    /// The backward pass of one micro-batch through such a stage, from its output's gradient, which is none if nothing above is
    /// trained. Returns the gradient of its input, if the stage before needs it.
    ///
    /// # Errors
    /// As [`Model::forward_backward`].
    pub fn backward_of_stage<'a>(
        &'a self,
        work: Work<'a>,
        gradient: Option<Buffer>,
        replayed: &mut ReplayCounts,
    ) -> Result<Option<Buffer>> {
        let mut pass = Pass::new(self, work);
        if let Some(gradient) = gradient {
            pass.file_gradient_at(pass.output_of_stage(), gradient);
        }
        let outcome = pass.backward_to_end();
        pass.ended(outcome, replayed)
    }
}

impl Pass<'_> {
    fn forward_and_backward(&mut self) -> Result<Option<Buffer>> {
        self.forward()?;
        self.head()?;
        self.each_part(Pass::balance_loss)?;
        self.backward_to_end()
    }

    /// The backward pass from the filed gradient of its blocks' output.
    fn backward_to_end(&mut self) -> Result<Option<Buffer>> {
        let kernels = self.work.kernels;
        let training = self.work.purpose.training();
        if let (Some(optimizer), true) = (&mut training.optimizer, training.is_last_micro_batch) {
            optimizer.before_backward(kernels)?;
        }
        let gradient = self.backward()?;
        let Work {
            weights, kernels, ..
        } = &mut self.work;
        weights.end_pass(kernels)?;
        self.each_part(|pass| {
            assert!(
                pass.work.saved.is_empty(),
                "every activation is released by the last stage that needs it"
            );
            assert!(
                pass.gradients_are_taken(),
                "every gradient of an activation is taken by the stage that wrote it"
            );
            Ok(())
        })?;
        Ok(gradient)
    }

    /// Counts the replays of a pass that ended, and drops everything if it failed.
    fn ended<T>(mut self, outcome: Result<T>, replayed: &mut ReplayCounts) -> Result<T> {
        replayed.add_all(&self.replayed);
        if outcome.is_err() {
            self.abandon()?;
        }
        outcome
    }

    /// Embedding and blocks, as far as the pass runs them; leaves the input of what follows in the table.
    pub(crate) fn forward(&mut self) -> Result {
        let phase = self.work.purpose.forward_phase();
        let layers = self.work.layers.clone();
        self.each_part(|pass| {
            pass.work.saved.begin_micro_batch();
            Ok(())
        })?;
        if layers.start == 0 {
            let _place = self.enter(phase, Layer::Embedding);
            self.before_forward(Layer::Embedding)?;
            self.each_part(|pass| pass.forward_stage(StagePosition::EMBEDDING))?;
        }
        for layer in layers.clone() {
            let _place = self.enter(phase, Layer::Block(layer));
            self.before_forward(Layer::Block(layer))?;
            self.forward_block(layer)?;
            if layer > layers.start {
                self.each_part(|pass| {
                    let work = &mut pass.work;
                    work.saved.give_back_left(work.kernels, layer - 1)
                })?;
            }
        }
        Ok(())
    }

    /// Brings a part's weights to the device, has the optimizer update them if that is due, and only then fetches the next
    /// weights. Uploads run in order, and the update waits for uploads of its own.
    fn before_forward(&mut self, part: Layer) -> Result {
        self.go_on()?;
        let unit = self.model.unit_of_part(part);
        let work = &mut self.work;
        let Purpose::Training(training) = &mut work.purpose else {
            return Ok(());
        };
        if let Some(unit) = unit {
            work.weights.use_unit(work.kernels, unit)?;
        }
        if let (Some(optimizer), true) = (&mut training.optimizer, training.is_first_micro_batch) {
            let (weights, gradients) = (&mut *work.weights, &*training.gradients);
            optimizer.before_forward(work.kernels, weights, gradients, part)?;
        }
        Ok(work.weights.look_ahead(work.kernels)?)
    }

    /// Drops everything after a pass that ended early. The host waits for copies under way; it fails only if the device
    /// does.
    pub(crate) fn abandon(&mut self) -> Result {
        let work = &mut self.work;
        let saved = work.saved.abandon(work.kernels);
        let weights = work.weights.abandon(work.kernels);
        let gradients = match &mut work.purpose {
            Purpose::Training(training) => training.gradients.abandon(work.kernels),
            Purpose::Inference(_) | Purpose::Reference => Ok(()),
        };
        Ok(saved.and(weights).and(gradients)?)
    }

    /// Opens the gradients of a unit, so that they can be added to until it is closed.
    pub(crate) fn open_gradients(&mut self, unit: Option<usize>) -> Result<Option<OpenUnit>> {
        let work = &mut self.work;
        let gradients = &mut *work.purpose.training().gradients;
        let open = unit.map(|unit| gradients.open(work.kernels, unit));
        Ok(open.transpose()?)
    }

    /// Starts fetching the gradients that earlier micro-batches made of a part. It is called one part ahead, so that
    /// the copy has that long.
    fn fetch_gradients(&mut self, part: Layer) -> Result {
        let defers = matches!(part, Layer::Block(layer) if self.defers_gradients_of(layer));
        let unit = self.model.unit_of_part(part).filter(|_| !defers);
        let work = &mut self.work;
        let gradients = &mut *work.purpose.training().gradients;
        match unit {
            Some(unit) => Ok(gradients.fetch(work.kernels, unit)?),
            None => Ok(()),
        }
    }

    /// Closes the gradients of a unit that a part has added to: its own, or the embedding's if the head is tied to it.
    fn close_gradients(&mut self, part: Layer, open: Option<OpenUnit>) -> Result {
        let Some(open) = open else {
            return Ok(());
        };
        let unit = open.unit();
        let is_own = self.model.unit_of_part(part) == Some(unit);
        let gradients = &self.work.purpose.training().gradients;
        let is_released = gradients.is_released() && gradients.has_trained(unit);
        if is_own && is_released {
            self.use_unit(unit)?;
        }
        let work = &mut self.work;
        let training = work.purpose.training();
        let is_last = training.is_last_micro_batch;
        training
            .gradients
            .close(work.kernels, open, (is_own, is_last))?;
        if let Some(optimizer) = &mut training.optimizer
            && (is_own && is_last && is_released)
        {
            let (weights, gradients) = (&mut *work.weights, &mut *training.gradients);
            let loss = training.losses[0].sums.as_in().rows(0..1);
            optimizer.after_backward(work.kernels, weights, gradients, part, loss)?;
        }
        Ok(())
    }

    /// Breaks the micro-batch off if the caller asks for that. The backward pass is not broken off where gradients are
    /// released: it has updated some weights already.
    fn go_on(&self) -> Result {
        match &self.work.purpose {
            Purpose::Training(training) if (training.is_stopped)() => Err(ModelError::Stopped),
            _ => Ok(()),
        }
    }

    /// Takes the head's input out of the table.
    pub(crate) fn take_head_input(&mut self) -> Result<Buffer> {
        self.allow(&self.model.architecture().head_parameters)?;
        Ok(self.work.saved.take(self.head_input()))
    }

    fn head_input(&self) -> LayerActivation {
        LayerActivation::input_of(self.model.layers())
    }

    /// The output of the last block of the pass.
    fn output_of_stage(&self) -> LayerActivation {
        LayerActivation::input_of(self.work.layers.end)
    }

    /// The head, forward and backward; files the gradient of its input.
    fn head(&mut self) -> Result {
        let _place = self.enter(Phase::Forward, Layer::Head);
        self.before_forward(Layer::Head)?;
        let mut inputs = self.each_part(Pass::take_head_input)?.into_iter();
        let unit = self.unit_of(&self.model.architecture().head_parameters);
        let open = self.open_gradients(unit)?;
        let (head, chunk) = (&self.model.architecture().head, self.model.head_chunk());
        self.each_part(|pass| {
            let x = inputs.next().expect("every part has an input");
            let dx = head.loss_and_gradient(pass, x, chunk)?;
            pass.file_gradient_at(pass.head_input(), dx);
            Ok(())
        })?;
        self.close_gradients(Layer::Head, open)
    }

    /// The backward pass, from the gradient of the last block's output down to the embedding, or to the lowest block with a
    /// trained parameter. In a pipeline it ends at the stage's first block, whose input's gradient it returns.
    fn backward(&mut self) -> Result<Option<Buffer>> {
        let layers = self.work.layers.clone();
        let lowest = self.model.architecture().lowest_trained;
        let last_block = layers.end - 1;
        let first = lowest.unwrap_or(0).clamp(layers.start, layers.end);
        if layers.end < self.model.layers() {
            self.each_part(|pass| pass.fetch_block(last_block))?;
        }
        for layer in (first..layers.end).rev() {
            let _place = self.enter(Phase::Backward, Layer::Block(layer));
            if !self.work.purpose.training().gradients.is_released() {
                self.go_on()?;
            }
            let open = self.open_block(layer)?;
            match layer.checked_sub(1) {
                _ if layer == first && (layer > 0 || lowest.is_some()) => {}
                Some(next) => {
                    self.each_part(|pass| pass.fetch_block(next))?;
                    self.fetch_gradients(Layer::Block(next))?;
                }
                None => self.fetch_gradients(Layer::Embedding)?,
            }
            self.backward_block(layer)?;
            self.close_gradients(Layer::Block(layer), open)?;
        }
        let gradient = self.leave_blocks(layers.start, first)?;
        let kernels = self.work.kernels;
        let training = self.work.purpose.training();
        let is_last = training.is_last_micro_batch;
        training.gradients.add_up_vectors(kernels, is_last)?;
        let is_complete = is_last && training.deferred.is_none();
        training.gradients.end_pass(kernels, is_complete)?;
        Ok(gradient)
    }

    /// Opens what the backward pass of a block adds to: the gradients of its unit, unless they are deferred.
    fn open_block(&mut self, layer: usize) -> Result<Option<OpenUnit>> {
        if self.defers_gradients_of(layer) {
            let kernels = self.work.kernels;
            let gradients = &mut *self.work.purpose.training().gradients;
            gradients.open_vectors(kernels)?;
            return Ok(None);
        }
        self.open_gradients(self.model.unit_of_part(Layer::Block(layer)))
    }

    /// Ends a backward pass whose blocks begin at `start`, and of which `ended` is the lowest that went backward: runs the embedding's
    /// backward pass, or drops what nothing below needs, or returns the gradient for the stage before.
    fn leave_blocks(&mut self, start: usize, ended: usize) -> Result<Option<Buffer>> {
        let _place = self.enter(Phase::Backward, Layer::Embedding);
        let lowest = self.model.architecture().lowest_trained;
        if lowest.is_some_and(|lowest| lowest >= start) {
            self.each_part(|pass| {
                pass.leave_below(start, ended);
                Ok(())
            })?;
        } else if start > 0 {
            return Ok(Some(self.gradient_of_input(start)));
        } else {
            let unit = self.model.unit_of_part(Layer::Embedding);
            let open = self.open_gradients(unit)?;
            self.each_part(|pass| pass.backward_stage(StagePosition::EMBEDDING))?;
            self.close_gradients(Layer::Embedding, open)?;
        }
        Ok(None)
    }

    /// Drops what no backward pass will take: the gradient of the lowest block's input, and what replays have made in
    /// the blocks below, from block `start` on.
    fn leave_below(&mut self, start: usize, lowest: usize) {
        self.own_mut().flowing.retain(|(of, _)| of.layer != lowest);
        let blocks = self.model.architecture().blocks.iter().enumerate();
        for (layer, block) in blocks.skip(start).take(lowest - start) {
            for (activation, _) in block.activations() {
                let made = LayerActivation { layer, activation };
                self.work.saved.release(made);
            }
        }
    }

    /// Starts fetching a block's offloaded activations, in the order in which its backward pass reads them. It is
    /// called at the start of the next block's backward pass, so that the copies have that long.
    fn fetch_block(&mut self, layer: usize) -> Result {
        let block = &self.model.architecture().blocks[layer];
        let shape = self.batch().shape;
        let work = &mut self.work;
        for declared in block.stages.iter().rev() {
            for activation in &declared.io.backward_reads {
                let at = LayerActivation {
                    layer,
                    activation: *activation,
                };
                if work.saved.is_away(at) {
                    work.saved.fetch(work.memory, work.kernels, at, shape)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_model::TestModel;
    use std::cell::Cell;

    /// Runs a micro-batch, which is stopped when it asks for the part of this number. Returns how often it asked.
    fn run(fixture: &mut TestModel, stopped_at: usize) -> (Result<Option<Buffer>>, usize) {
        let asked = Cell::new(0);
        let is_stopped = || asked.replace(asked.get() + 1) == stopped_at;
        let mut replayed = fixture.model.no_replays();
        let outcome = fixture.train(&is_stopped, |model, work| {
            model.forward_backward(work, &mut replayed)
        });
        (outcome, asked.get())
    }

    #[test]
    fn every_parameter_gets_a_gradient_and_nothing_is_left() {
        let mut fixture = TestModel::new("none");
        let live = fixture.memory.live_leases();
        let (outcome, asked) = run(&mut fixture, usize::MAX);
        outcome.unwrap();
        // The embedding, both blocks and the head; then the blocks backward.
        assert_eq!(asked, 4 + 2);
        assert_eq!(fixture.gradients.missing(), [""; 0]);
        assert!(fixture.saved.is_empty());
        assert_eq!(fixture.memory.live_leases(), live);
    }

    #[test]
    fn a_micro_batch_that_is_stopped_leaves_nothing() {
        for part in 0..6 {
            let mut fixture = TestModel::new("full");
            let live = fixture.memory.live_leases();
            let (outcome, asked) = run(&mut fixture, part);
            assert!(matches!(outcome, Err(ModelError::Stopped)), "{part}");
            assert_eq!(asked, part + 1);
            assert!(fixture.saved.is_empty());
            assert_eq!(fixture.memory.live_leases(), live);
        }
    }
}
