//! Updates at the end of a step or in its backward pass, and makes early an update that a forward pass would make.

use crate::Result;
use crate::error::SessionError;
use crate::session::Session;
use kernels::{Account, Queue};
use memory::{Layer, Phase, UpdateTime};
use optim::StepNumbers;

impl Session {
    /// Makes the pending update, and waits until all that is offloaded is back in its home.
    pub(crate) fn finish_update(&mut self) -> Result {
        self.refuse_half_updated()?;
        let _place = self.memory.enter(Phase::Optimizer, Layer::Whole);
        let before = self.kernels.traffic_of_step_before();
        let _account = self.kernels.count_to_step_before(Account::Update);
        let (kernels, weights) = (&*self.kernels, &mut self.weights);
        self.optimizer.finish(kernels, weights, &self.gradients)?;
        weights.wait_until_gathered(kernels)?;
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

    /// Makes the update of a step whose gradients are complete, except what the next forward pass updates.
    pub(crate) fn update(&mut self) -> Result {
        let _place = self.memory.enter(Phase::Optimizer, Layer::Whole);
        let numbers = self.next_numbers();
        let (kernels, loss) = (&*self.kernels, self.losses.sum());
        let (weights, gradients) = (&mut self.weights, &mut self.gradients);
        self.optimizer
            .end_step(kernels, weights, gradients, loss, numbers)?;
        // Set only now: an update that was refused its scratch memory has not been made.
        self.step = numbers.step;
        if self.optimizer.update_time() != UpdateTime::NextForward {
            self.optimizer.finish(kernels, weights, gradients)?;
        }
        Ok(weights.gather_updated(kernels)?)
    }

    /// Begins an update in the backward pass. Finishes the previous step first, because the update's numbers depend on the number of
    /// updates.
    pub(crate) fn begin_update(&mut self) -> Result {
        self.finish_in_flight()?;
        let _place = self.memory.enter(Phase::Optimizer, Layer::Whole);
        let numbers = self.next_numbers();
        Ok(self.optimizer.begin_step(&*self.kernels, numbers)?)
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
