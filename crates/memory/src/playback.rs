//! What was live after each event of a history.

use crate::{ByCategory, History, Layer, Lease, MemoryChange, Peak, Phase, Place, Space};

/// A history, with what was live after each event.
#[derive(Clone, Debug)]
pub struct Playback {
    /// One per event.
    pub instants: Vec<AfterEvent>,
    /// The index of the event that began the step; 0 if none began.
    pub step: usize,
    /// The index of the step's event after which most device memory was leased; the first one of several.
    pub peak: usize,
    /// Whether time passed in the step. If not, [`AfterEvent::at_s`] counts events, a microsecond each.
    pub is_timed: bool,
    /// Within the step, the difference between [`AfterEvent::at_s`] and the history's times.
    pub shift_s: f64,
}

/// The state after an event.
#[derive(Clone, Copy, Debug)]
pub struct AfterEvent {
    /// Seconds since the first event. The time between loading and the step is left out, because other steps ran then.
    pub at_s: f64,
    /// Where the run was.
    pub place: Place,
    /// Leased device bytes.
    pub live: ByCategory,
}

impl Playback {
    /// Replays the events of a history.
    pub fn new(history: &History) -> Playback {
        let events = &history.events;
        let begins = |change: &MemoryChange| *change == MemoryChange::BeginStep;
        let step = events.iter().rposition(|event| begins(&event.change));
        let step = step.unwrap_or(0);
        let at = |event: usize| events.get(event).map_or(0.0, |event| event.at_s);
        let is_timed = at(events.len().saturating_sub(1)) > at(step);
        let load_shift_s = -at(0);
        let load_s = at(step.saturating_sub(1)) + load_shift_s;
        let shift_s = load_s - at(step);
        let mut place = Place {
            phase: Phase::Load,
            layer: Layer::Whole,
        };
        let mut live = ByCategory::default();
        let mut leases = Slots::default();
        let mut instants = Vec::with_capacity(events.len());
        let (mut peak, mut peak_bytes) = (step, 0);
        for (number, event) in events.iter().enumerate() {
            if let MemoryChange::Enter(entered) = event.change {
                place = entered;
            }
            if let Some((left, came)) = leases.follow(&event.change) {
                for lease in left.iter().filter(|lease| lease.space == Space::Device) {
                    *live.get_mut(lease.category) -= lease.bytes;
                }
                for lease in came.iter().filter(|lease| lease.space == Space::Device) {
                    *live.get_mut(lease.category) += lease.bytes;
                }
            }
            if number >= step && (number == step || live.total() > peak_bytes) {
                (peak, peak_bytes) = (number, live.total());
            }
            let at_s = match is_timed {
                true if number < step => event.at_s + load_shift_s,
                true => event.at_s + shift_s,
                false => number as f64 * 1e-6,
            };
            instants.push(AfterEvent { at_s, place, live });
        }
        Playback {
            instants,
            step,
            peak,
            is_timed,
            shift_s,
        }
    }

    /// The peak of the step, as the ledger had it; none if the history is empty.
    pub fn peak(&self) -> Option<Peak> {
        let instant = self.instants.get(self.peak)?;
        Some(Peak {
            bytes: instant.live.total(),
            by_category: instant.live,
            place: instant.place,
        })
    }

    /// Leases in device memory that were live at the peak, largest first. Equal sizes are ordered by name and layer.
    pub fn largest_at_peak(&self, history: &History) -> Vec<Lease> {
        let mut leases = Slots::default();
        for event in history.events.iter().take(self.peak + 1) {
            leases.follow(&event.change);
        }
        let live = leases.0.into_iter().flatten();
        let mut live: Vec<Lease> = live.filter(|lease| lease.space == Space::Device).collect();
        live.sort_by_key(|lease| {
            (
                std::cmp::Reverse(lease.bytes),
                lease.name,
                lease.place.layer,
            )
        });
        live
    }

    /// The last event after which `live_bytes` were live; the last event of all if there was none.
    pub fn last_with(&self, live_bytes: u64) -> usize {
        let mut instants = self.instants.iter();
        let found = instants.rposition(|instant| instant.live.total() == live_bytes);
        found.unwrap_or(self.instants.len().saturating_sub(1))
    }
}

/// The live leases, by number.
#[derive(Default)]
struct Slots(Vec<Option<Lease>>);

impl Slots {
    /// Applies an event. Returns the lease that it changed, before and after; none if it changed no lease.
    fn follow(&mut self, change: &MemoryChange) -> Option<(Option<Lease>, Option<Lease>)> {
        let (number, became) = match *change {
            MemoryChange::Take { number, lease, .. } => (number, Some(lease)),
            MemoryChange::GiveBack { number } => (number, None),
            MemoryChange::Recategorize { number, category } => {
                let lease = self.0[number].expect("what changes is live");
                (number, Some(Lease { category, ..lease }))
            }
            MemoryChange::ReserveSlab { .. } | MemoryChange::Enter(_) | MemoryChange::BeginStep => {
                return None;
            }
        };
        if self.0.len() <= number {
            self.0.resize(number + 1, None);
        }
        Some((std::mem::replace(&mut self.0[number], became), became))
    }
}
