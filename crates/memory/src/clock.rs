//! Time by phase.

use crate::{Blocks, ByPhase, Phase, Stamp};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Time spent in each phase of a step. A phase does not count the time of phases that were entered from it.
///
/// On a device it is the device's own time, known once the step's work is done. [`PhaseTime::read`] waits for that. It
/// may be called while later steps run.
#[derive(Clone)]
pub struct PhaseTime(Source);

#[derive(Clone)]
enum Source {
    Spent(ByPhase<Duration>),
    Stamped(Rc<Stamps>),
}

impl PhaseTime {
    /// The time by phase. On a device, waits until it is known. Time that a failed device cannot tell counts as zero.
    pub fn read(&self) -> ByPhase<Duration> {
        match &self.0 {
            Source::Spent(spent) => *spent,
            Source::Stamped(stamps) => stamps.read(),
        }
    }
}

impl std::fmt::Debug for PhaseTime {
    /// Omits the times, which may not be known yet.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PhaseTime").finish_non_exhaustive()
    }
}

/// Measures the time of a step, phase by phase.
pub(crate) enum PhaseClock {
    /// Uses the processor's clock.
    Host {
        since: Instant,
        spent: ByPhase<Duration>,
    },
    /// Uses stamps in a device's stream.
    Device(Rc<Stamps>),
}

impl PhaseClock {
    /// Starts a clock of the processor.
    pub(crate) fn host() -> PhaseClock {
        PhaseClock::Host {
            since: Instant::now(),
            spent: ByPhase::default(),
        }
    }

    /// Starts a clock of a device. It measures the work that is enqueued from now on.
    pub(crate) fn device(blocks: &Rc<dyn Blocks>) -> PhaseClock {
        PhaseClock::Device(Rc::new(Stamps {
            first: blocks.stamp(),
            left: RefCell::default(),
            blocks: blocks.clone(),
        }))
    }

    /// Ends one phase and begins another.
    pub(crate) fn change(&mut self, left: Phase, entered: Phase) {
        if left == entered {
            return;
        }
        match self {
            PhaseClock::Host { since, spent } => {
                let now = Instant::now();
                *spent.get_mut(left) += now - *since;
                *since = now;
            }
            PhaseClock::Device(stamps) => stamps.leave(left),
        }
    }

    /// The time since the clock started. On a device it ends when the next clock starts.
    pub(crate) fn time(&self) -> PhaseTime {
        PhaseTime(match self {
            PhaseClock::Host { spent, .. } => Source::Spent(*spent),
            PhaseClock::Device(stamps) => Source::Stamped(stamps.clone()),
        })
    }
}

/// The stamps of a step.
pub(crate) struct Stamps {
    blocks: Rc<dyn Blocks>,
    first: Option<Stamp>,
    /// Each phase with the stamp at its end. No stamp if the device got the work of several phases in one launch.
    left: RefCell<Vec<(Phase, Option<Stamp>)>>,
}

impl Stamps {
    fn leave(&self, phase: Phase) {
        let stamp = self.blocks.stamp();
        self.left.borrow_mut().push((phase, stamp));
    }

    fn read(&self) -> ByPhase<Duration> {
        let mut spent = ByPhase::default();
        let Some(mut since) = self.first else {
            return spent;
        };
        let (mut together, mut at_once) = (Vec::new(), Vec::new());
        for (phase, stamp) in self.left.borrow().iter() {
            together.push(*phase);
            let Some(stamp) = stamp else {
                continue;
            };
            let time = self.blocks.elapsed(since, *stamp).unwrap_or_default();
            match &together[..] {
                [phase] => *spent.get_mut(*phase) += time,
                _ => at_once.push((together.clone(), time)),
            }
            together.clear();
            since = *stamp;
        }
        shared_out(spent, &at_once)
    }
}

/// Adds the time of phases that ran in one launch. Each phase gets a share in proportion to its time alone. If none ran
/// alone, the last phase gets all of it.
fn shared_out(alone: ByPhase<Duration>, at_once: &[(Vec<Phase>, Duration)]) -> ByPhase<Duration> {
    let mut spent = alone;
    for (phases, time) in at_once {
        let taken_part = Phase::ALL
            .into_iter()
            .filter(|phase| phases.contains(phase));
        let whole: Duration = taken_part.clone().map(|phase| alone.get(phase)).sum();
        if whole.is_zero() {
            let last = phases.last().expect("time has phases that took it");
            *spent.get_mut(*last) += *time;
            continue;
        }
        for phase in taken_part {
            let share = alone.get(phase).as_secs_f64() / whole.as_secs_f64();
            *spent.get_mut(phase) += time.mul_f64(share);
        }
    }
    spent
}

impl Drop for Stamps {
    fn drop(&mut self) {
        let left = self.left.borrow();
        let stamps = left.iter().filter_map(|(_, stamp)| *stamp);
        let stamps = stamps.chain(self.first);
        stamps.for_each(|stamp| self.blocks.give_back_stamp(stamp));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_at_once_share_time_as_they_took_it_alone() {
        let ms = Duration::from_millis;
        let alone = ByPhase {
            forward: ms(10),
            backward: ms(30),
            optimizer: ms(5),
            ..ByPhase::default()
        };
        let both = vec![Phase::Forward, Phase::Backward, Phase::Forward];
        let spent = shared_out(alone, &[(both.clone(), ms(20)), (both, ms(20))]);
        assert_eq!((spent.forward, spent.backward), (ms(20), ms(60)));
        assert_eq!(spent.optimizer, ms(5), "it took no part");

        let none = vec![Phase::Forward, Phase::Recompute];
        let spent = shared_out(ByPhase::default(), &[(none, ms(7))]);
        assert_eq!((spent.forward, spent.recompute), (ms(0), ms(7)));
    }
}
