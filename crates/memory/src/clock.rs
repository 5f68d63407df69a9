//! Time by phase.

use crate::{ByPhase, Phase};
use std::time::{Duration, Instant};

/// Time spent in each phase, without what was spent in phases entered from it.
pub(crate) struct PhaseClock {
    since: Instant,
    pub(crate) spent: ByPhase<Duration>,
}

impl PhaseClock {
    pub(crate) fn new() -> PhaseClock {
        PhaseClock {
            since: Instant::now(),
            spent: ByPhase::default(),
        }
    }

    pub(crate) fn leave(&mut self, phase: Phase) {
        let now = Instant::now();
        *self.spent.get_mut(phase) += now - self.since;
        self.since = now;
    }
}
