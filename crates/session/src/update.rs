//! Updates at the end of a step or in its backward pass, and makes early an update that a forward pass would make.

use crate::Result;
use crate::error::SessionError;
use crate::session::Session;
use kernels::{Account, Queue};
use memory::{Layer, Phase};
use optim::StepNumbers;

impl Session {
    /// Makes the pending update, and waits until all that is offloaded is back in its home.
    pub(crate) fn finish_update(&mut self) -> Result {
        self.refuse_half_updated()?;
        let _place = self.memory.enter(Phase::Optimizer, Layer::Whole);
        let before = self.kernels.traffic_of_step_before();
        let _account = self.kernels.count_to_step_before(Account::Update);
        self.update_parts()?;
        self.weights.wait_until_gathered(&*self.kernels)?;
        let mut crossed = self.kernels.traffic_of_step_before().since(before);
        // Not counted: these units came only for this update, while in a forward pass they would be there anyway.
        crossed.weights.h2d_bytes = 0;
        if let Some(in_flight) = &mut self.in_flight {
            in_flight.crossed = in_flight.crossed.plus(crossed);
        }
        // Wait until other ranks have all that they need of this one, whatever comes next.
        for queue in [Queue::Download, Queue::Collective] {
            self.kernels.finish(self.kernels.record(queue)?)?;
        }
        Ok(())
    }

    pub(crate) fn refuse_half_updated(&self) -> Result {
        match self.is_half_updated {
            true => Err(SessionError::HalfUpdated),
            false => Ok(()),
        }
    }

    /// Makes the pending updates part by part, with each part's weights on the device.
    fn update_parts(&mut self) -> Result {
        let updated = self.update_with_weights();
        if updated.is_err() {
            self.weights.abandon(&*self.kernels)?;
        }
        updated
    }

    fn update_with_weights(&mut self) -> Result {
        let (memory, kernels) = (&self.memory, &*self.kernels);
        let (weights, gradients) = (&mut self.weights, &self.gradients);
        if self.optimizer.is_pending() && weights.is_on_host() {
            weights.begin_update(&self.orders.update);
            for index in self.orders.update.iter() {
                weights.use_unit(memory, kernels, *index)?;
                let part = self.model.layout().units()[*index].part;
                self.optimizer
                    .update_part(kernels, weights, gradients, part)?;
                weights.gather_updated_unit(kernels, *index)?;
                weights.look_ahead(memory, kernels)?;
            }
            weights.end_pass(kernels)?;
        }
        Ok(self.optimizer.finish(kernels, weights, gradients)?)
    }

    /// Makes the update of a step whose gradients are complete, except what the next forward pass updates.
    pub(crate) fn update(&mut self) -> Result {
        let _place = self.memory.enter(Phase::Optimizer, Layer::Whole);
        let _account = self.kernels.count_to(Account::Update);
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
        // Set only now: an update that was refused its scratch memory has not been made.
        self.step = numbers.step;
        if !self.settings.homes.updates_in_forward() {
            self.update_parts()?;
        }
        Ok(self.weights.gather_updated(&*self.kernels)?)
    }

    /// Sends the numbers for the update in the backward pass. Finishes the previous step first, because they depend on
    /// the number of updates.
    pub(crate) fn begin_released(&mut self) -> Result {
        self.finish_in_flight()?;
        let _place = self.memory.enter(Phase::Optimizer, Layer::Whole);
        let numbers = self.next_numbers();
        let _account = self.kernels.count_to(Account::Update);
        Ok(self.optimizer.begin_released(&*self.kernels, numbers)?)
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
