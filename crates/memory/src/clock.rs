//! Time by phase.

use crate::{Blocks, ByPhase, Phase, Stamp};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Time spent in each phase of a step, without what was spent in phases entered from it.
///
/// On a device it is the device's own time, which is known when the step's work is done: [`PhaseTime::read`] waits for
/// that, and may be called when later steps are under way.
#[derive(Clone)]
pub struct PhaseTime(Source);

#[derive(Clone)]
enum Source {
    Spent(ByPhase<Duration>),
    Stamped(Rc<Stamps>),
}

impl PhaseTime {
    /// The time by phase; on a device, waits until it is known. What earlier failures hide counts as nothing.
    pub fn read(&self) -> ByPhase<Duration> {
        match &self.0 {
            Source::Spent(spent) => *spent,
            Source::Stamped(stamps) => stamps.read(),
        }
    }
}

impl std::fmt::Debug for PhaseTime {
    /// Leaves the times out: they may not be known yet.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PhaseTime").finish_non_exhaustive()
    }
}

/// Takes the time of a step, phase by phase.
pub(crate) enum PhaseClock {
    /// The processor's clock tells the time.
    Host {
        since: Instant,
        spent: ByPhase<Duration>,
    },
    /// Stamps in a device's stream tell the time.
    Device(Rc<Stamps>),
}

impl PhaseClock {
    /// A clock of the processor, from now on.
    pub(crate) fn host() -> PhaseClock {
        PhaseClock::Host {
            since: Instant::now(),
            spent: ByPhase::default(),
        }
    }

    /// A clock of a device, from the work on that is asked for now.
    pub(crate) fn device(blocks: &Rc<dyn Blocks>) -> PhaseClock {
        PhaseClock::Device(Rc::new(Stamps {
            first: blocks.stamp(),
            left: RefCell::default(),
            blocks: blocks.clone(),
        }))
    }

    /// One phase is left for another.
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

    /// What was spent until now; on a device, until the next clock starts.
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
    /// Each phase with the stamp at its end; none where the device is asked for several phases at once.
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

/// Adds time that phases took at once, each its share by what it took alone; where none did, all of it is the last one's.
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
