//! Counts what crosses between host, device and disk in a step, by purpose.

use kernels::{Kernels, Traffic};
use units::{Gradients, Weights};

/// What crosses in a step, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTraffic {
    /// Units of weights, which are fetched for their use, and sent back after an update.
    pub weights: Traffic,
    /// Units of gradients, between micro-batches.
    pub gradients: Traffic,
    /// The rest of the update: states, and gradients that are fetched for it.
    pub update: Traffic,
    /// Everything else: tokens, and offloaded activations.
    pub passes: Traffic,
}

impl StepTraffic {
    /// The sum of all of them.
    pub fn total(&self) -> Traffic {
        self.weights
            .plus(self.gradients)
            .plus(self.update)
            .plus(self.passes)
    }

    /// Adds two of them.
    pub fn plus(self, other: StepTraffic) -> StepTraffic {
        self.with(other, Traffic::plus)
    }

    /// What crossed after `earlier`.
    pub fn since(self, earlier: StepTraffic) -> StepTraffic {
        self.with(earlier, Traffic::since)
    }

    /// What `count` of the same cross.
    pub fn times(self, count: usize) -> StepTraffic {
        self.with(self, |one, _| one.times(count))
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

    /// The same without the update's part.
    pub(crate) fn without_update(self) -> StepTraffic {
        StepTraffic {
            update: Traffic::default(),
            ..self
        }
    }
}

/// What has crossed so far: everything, and the units in it.
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

    /// Everything, if only updates were made.
    pub(crate) fn of_update(self) -> StepTraffic {
        StepTraffic {
            weights: self.weights,
            gradients: self.gradients,
            update: self.all.since(self.weights).since(self.gradients),
            passes: Traffic::default(),
        }
    }

    /// Separates the traffic of passes from that of updates beside them.
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

/// What crosses for updates during the passes of a step.
#[derive(Clone, Copy, Default)]
pub(crate) struct UpdateTraffic {
    /// The update of the previous step.
    pub(crate) before: StepTraffic,
    /// This step's update: what is fetched ahead, or all of it if it is made within the step.
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
