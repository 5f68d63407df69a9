//! What crosses in a step between host, device and disk, by what it is for.

use kernels::{Kernels, Traffic};
use units::{Gradients, Weights};

/// What crosses in a step, by what it is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTraffic {
    /// Units of weights, which come to be used, and go back when they were updated.
    pub weights: Traffic,
    /// Units of gradients, between micro-batches.
    pub gradients: Traffic,
    /// What else comes and goes for the update: states, and gradients that come for it.
    pub update: Traffic,
    /// All the rest: tokens, and activations that wait on the host.
    pub passes: Traffic,
}

impl StepTraffic {
    /// All of it.
    pub fn total(&self) -> Traffic {
        self.weights
            .plus(self.gradients)
            .plus(self.update)
            .plus(self.passes)
    }

    /// The sum of two.
    pub fn plus(self, other: StepTraffic) -> StepTraffic {
        self.with(other, Traffic::plus)
    }

    fn since(self, earlier: StepTraffic) -> StepTraffic {
        self.with(earlier, Traffic::since)
    }

    fn with(
        self,
        other: StepTraffic,
        combine: impl Fn(Traffic, Traffic) -> Traffic,
    ) -> StepTraffic {
        StepTraffic {
            weights: combine(self.weights, other.weights),
            gradients: combine(self.gradients, other.gradients),
            update: combine(self.update, other.update),
            passes: combine(self.passes, other.passes),
        }
    }

    /// The same without what was for the update alone.
    pub(crate) fn without_update(self) -> StepTraffic {
        StepTraffic {
            update: Traffic::default(),
            ..self
        }
    }
}

/// What has crossed so far, and how much of it was units.
#[derive(Clone, Copy)]
pub(crate) struct Count {
    all: Traffic,
    weights: Traffic,
    gradients: Traffic,
}

impl Count {
    pub(crate) fn of(kernels: &Kernels, weights: &Weights, gradients: &Gradients) -> Count {
        Count {
            all: kernels.traffic(),
            weights: weights.traffic(),
            gradients: gradients.traffic(),
        }
    }

    pub(crate) fn since(self, earlier: Count) -> Count {
        Count {
            all: self.all.since(earlier.all),
            weights: self.weights.since(earlier.weights),
            gradients: self.gradients.since(earlier.gradients),
        }
    }

    /// What crossed while there was nothing but updates.
    pub(crate) fn of_update(self) -> StepTraffic {
        StepTraffic {
            weights: self.weights,
            gradients: self.gradients,
            update: self.all.since(self.weights).since(self.gradients),
            passes: Traffic::default(),
        }
    }

    /// Tells what crossed for passes from what crossed for the updates beside them.
    pub(crate) fn split(self, beside: &UpdateTraffic) -> StepTraffic {
        let all = self.all.since(beside.before.total());
        let (weights, gradients) = (self.weights.since(beside.before.weights), self.gradients);
        let update = beside.own.update;
        StepTraffic {
            weights,
            gradients,
            update,
            passes: all.since(weights).since(gradients).since(update),
        }
    }
}

/// What crosses for updates while a step passes through the model.
#[derive(Clone, Copy, Default)]
pub(crate) struct UpdateTraffic {
    /// What the update of the step before moves.
    pub(crate) before: StepTraffic,
    /// What this step's update moves: what it fetches ahead, and all of it where it is made within the step.
    pub(crate) own: StepTraffic,
}

impl UpdateTraffic {
    pub(crate) fn since(self, earlier: UpdateTraffic) -> UpdateTraffic {
        UpdateTraffic {
            before: self.before.since(earlier.before),
            own: self.own.since(earlier.own),
        }
    }
}
