//! The update of a step: at its end, in its backward pass, or what a forward pass to come would have made, finished early.

use crate::error::SessionError;
use crate::session::Session;
use crate::step_traffic::{Count, StepTraffic};
use kernels::Queue;
use memory::{Layer, Phase};
use optim::StepNumbers;

impl Session {
    /// Updates what is pending, and waits until everything that is offloaded is back where it belongs.
    pub(crate) fn finish_update(&mut self) -> Result<(), SessionError> {
        self.refuse_half_updated()?;
        let _place = self.memory.enter(Phase::Optimizer, Layer::Whole);
        let before = self.count();
        self.update_parts()?;
        let mut crossed = self.count().since(before).of_update();
        // Units that came for this alone: in the next forward pass they would have been there.
        crossed.weights.h2d_bytes = 0;
        if let Some(in_flight) = &mut self.in_flight {
            in_flight.crossed = in_flight.crossed.plus(crossed);
        }
        self.weights.wait_until_gathered(&*self.kernels)?;
        // What other ranks need of this one has gone, too, whatever comes next.
        for queue in [Queue::Download, Queue::Collective] {
            self.kernels.finish(self.kernels.record(queue)?)?;
        }
        Ok(())
    }

    pub(crate) fn refuse_half_updated(&self) -> Result<(), SessionError> {
        match self.is_half_updated {
            true => Err(SessionError::HalfUpdated),
            false => Ok(()),
        }
    }

    /// Updates what is pending, part by part, with each part's weights on the device.
    fn update_parts(&mut self) -> Result<(), SessionError> {
        let updated = self.update_with_weights();
        if updated.is_err() {
            self.weights.abandon(&*self.kernels)?;
        }
        updated
    }

    fn update_with_weights(&mut self) -> Result<(), SessionError> {
        let (memory, kernels) = (&self.memory, &*self.kernels);
        let (weights, gradients) = (&mut self.weights, &self.gradients);
        if self.optimizer.is_pending() && weights.is_on_host() {
            weights.begin_update(&self.orders.update);
            for index in self.orders.update.iter() {
                weights.use_unit(memory, kernels, *index)?;
                let part = self.model.layout().units()[*index].part;
                self.optimizer
                    .update_part(kernels, weights, gradients, part)?;
                weights.look_ahead(memory, kernels)?;
            }
            weights.end_pass(kernels)?;
        }
        Ok(self.optimizer.finish(kernels, weights, gradients)?)
    }

    /// What has crossed so far.
    pub(crate) fn count(&self) -> Count {
        Count::of(&*self.kernels, &self.weights, &self.gradients)
    }

    /// The update of the step whose gradients are there: what is not made in the next forward pass.
    pub(crate) fn update(&mut self, crossed: &mut StepTraffic) -> Result<(), SessionError> {
        let _place = self.memory.enter(Phase::Optimizer, Layer::Whole);
        let before = self.count();
        let numbers = self.next_numbers();
        let (kernels, loss) = (&*self.kernels, self.losses.sum());
        let (weights, gradients) = (&mut self.weights, &mut self.gradients);
        if gradients.is_released() {
            self.optimizer
                .end_released(kernels, weights, gradients, loss)?;
        } else {
            self.optimizer
                .begin(kernels, weights, gradients, loss, numbers)?;
        }
        // One that was refused its scratch has not been made.
        self.step = numbers.step;
        if !self.settings.homes.updates_in_forward() {
            self.update_parts()?;
        }
        self.weights.gather_updated(&*self.kernels)?;
        *crossed = crossed.plus(self.count().since(before).of_update());
        Ok(())
    }

    /// Sends the numbers of the update that the backward pass is to make. The step before is done: they depend on how many
    /// updates there were.
    pub(crate) fn begin_released(&mut self, crossed: &mut StepTraffic) -> Result<(), SessionError> {
        self.finish_in_flight()?;
        let _place = self.memory.enter(Phase::Optimizer, Layer::Whole);
        let before = self.count();
        let numbers = self.next_numbers();
        self.optimizer.begin_released(&*self.kernels, numbers)?;
        *crossed = crossed.plus(self.count().since(before).of_update());
        Ok(())
    }

    fn next_numbers(&self) -> StepNumbers {
        let step = self.step + 1;
        StepNumbers {
            step,
            update: self.updates + 1,
            learning_rate: self.settings.schedule.rate(step),
            matrix_rate: self.settings.matrix_rate(step).unwrap_or_default(),
            seed: self.settings.seed,
        }
    }
}
