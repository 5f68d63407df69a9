//! The record of every lease: what is live, and what was live at the peak.

use crate::{ByCategory, ByPhase, Category, Layer, Phase, Place, Space};
use serde::Serialize;

/// A lease in the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The tensor's name; with the place it is unique among live leases of one kind.
    pub name: &'static str,
    /// What it is for.
    pub category: Category,
    /// Where in the step it was leased.
    pub place: Place,
    /// In which memory it lies.
    pub space: Space,
    /// Size, rounded to the granularity.
    pub bytes: u64,
}

/// A lease that was live at some instant, for reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LiveLease {
    /// The tensor's name.
    pub name: &'static str,
    /// The block it belongs to; none outside the blocks.
    pub layer: Layer,
    /// The phase in which it was leased.
    pub phase: Phase,
    /// What it was for.
    pub category: Category,
    /// Size in bytes.
    pub bytes: u64,
}

/// The instant at which most device memory was leased.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peak {
    /// Live bytes at that instant.
    pub bytes: u64,
    /// The same bytes by category.
    pub by_category: ByCategory,
    /// Where the step was.
    pub place: Place,
}

#[derive(Debug)]
struct Record {
    lease: Lease,
    sequence: u64,
}

/// Live and peak bytes, in total, by category and by phase.
///
/// Peaks count from the last [`Ledger::begin_step`]. A phase's peak also counts what is live whenever the phase is
/// entered or returned to.
#[derive(Debug)]
pub struct Ledger {
    records: Vec<Option<Record>>,
    vacant: Vec<usize>,
    sequence: u64,
    place: Place,
    live: ByCategory,
    live_bytes: u64,
    peak: Peak,
    /// Leases up to this sequence number existed at the peak.
    peak_sequence: u64,
    /// Leases that were live at the peak and have been given back since.
    freed_since_peak: Vec<Lease>,
    phase_peaks: ByPhase<u64>,
    host_live_bytes: u64,
    host_peak_bytes: u64,
}

impl Default for Ledger {
    fn default() -> Ledger {
        let place = Place {
            phase: Phase::Load,
            layer: Layer::Whole,
        };
        Ledger {
            // Room for a large model's step, so that the ledger itself does not allocate during one.
            records: Vec::with_capacity(4096),
            vacant: Vec::with_capacity(4096),
            sequence: 0,
            place,
            live: ByCategory::default(),
            live_bytes: 0,
            peak: Peak {
                bytes: 0,
                by_category: ByCategory::default(),
                place,
            },
            peak_sequence: 0,
            freed_since_peak: Vec::with_capacity(4096),
            phase_peaks: ByPhase::default(),
            host_live_bytes: 0,
            host_peak_bytes: 0,
        }
    }
}

impl Ledger {
    /// Records a lease and returns its number, to be given back with it.
    pub fn take(&mut self, lease: Lease) -> usize {
        self.sequence += 1;
        match lease.space {
            Space::Device => {
                *self.live.get_mut(lease.category) += lease.bytes;
                self.live_bytes += lease.bytes;
                self.note_phase_peak();
                if self.live_bytes > self.peak.bytes {
                    self.note_peak();
                }
            }
            Space::Host => {
                self.host_live_bytes += lease.bytes;
                self.host_peak_bytes = self.host_peak_bytes.max(self.host_live_bytes);
            }
        }
        let record = Some(Record {
            lease,
            sequence: self.sequence,
        });
        match self.vacant.pop() {
            Some(number) => {
                self.records[number] = record;
                number
            }
            None => {
                self.records.push(record);
                self.records.len() - 1
            }
        }
    }

    /// Removes a lease.
    pub fn give_back(&mut self, number: usize) {
        let record = self.records[number]
            .take()
            .expect("a lease is given back once: its owner is not Clone");
        self.vacant.push(number);
        match record.lease.space {
            Space::Device => {
                *self.live.get_mut(record.lease.category) -= record.lease.bytes;
                self.live_bytes -= record.lease.bytes;
                if record.sequence <= self.peak_sequence {
                    self.freed_since_peak.push(record.lease);
                }
            }
            Space::Host => self.host_live_bytes -= record.lease.bytes,
        }
    }

    /// Changes the category of a live lease. A kept activation that the backward pass overwrites is a temporary from
    /// then on.
    pub fn recategorize(&mut self, number: usize, category: Category) {
        let record = self.records[number]
            .as_mut()
            .expect("only the owner of a live lease calls this");
        if record.lease.space == Space::Device {
            *self.live.get_mut(record.lease.category) -= record.lease.bytes;
            *self.live.get_mut(category) += record.lease.bytes;
            if record.sequence <= self.peak_sequence {
                // The peak keeps the old category. From now on this counts as a lease taken after the peak.
                self.freed_since_peak.push(record.lease);
                self.sequence += 1;
                record.sequence = self.sequence;
            }
        }
        record.lease.category = category;
    }

    /// Enters a place, and returns the one that was left.
    pub fn enter(&mut self, place: Place) -> Place {
        let left = std::mem::replace(&mut self.place, place);
        self.note_phase_peak();
        left
    }

    /// Restarts the peaks. The peak of [`Phase::Load`] stays, since loading is over and every report shows it.
    pub fn begin_step(&mut self) {
        self.phase_peaks = ByPhase {
            load: self.phase_peaks.load,
            ..ByPhase::default()
        };
        self.peak.bytes = 0;
        self.note_peak();
    }

    fn note_phase_peak(&mut self) {
        let peak = self.phase_peaks.get_mut(self.place.phase);
        *peak = (*peak).max(self.live_bytes);
    }

    fn note_peak(&mut self) {
        self.peak = Peak {
            bytes: self.live_bytes,
            by_category: self.live,
            place: self.place,
        };
        self.peak_sequence = self.sequence;
        self.freed_since_peak.clear();
    }

    /// Where the step is.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Bytes leased now.
    pub fn live_bytes(&self, space: Space) -> u64 {
        match space {
            Space::Device => self.live_bytes,
            Space::Host => self.host_live_bytes,
        }
    }

    /// Device bytes leased now, by category.
    pub fn live_by_category(&self) -> ByCategory {
        self.live
    }

    /// Number of leases held now.
    pub fn live_leases(&self) -> usize {
        self.records.len() - self.vacant.len()
    }

    /// The instant of the highest device use since [`Ledger::begin_step`].
    pub fn peak(&self) -> Peak {
        self.peak
    }

    /// Highest use of host memory since the beginning. Pinned memory is allocated only once.
    pub fn host_peak_bytes(&self) -> u64 {
        self.host_peak_bytes
    }

    /// Highest device use in each phase since [`Ledger::begin_step`].
    pub fn phase_peaks(&self) -> ByPhase<u64> {
        self.phase_peaks
    }

    /// Live leases in device memory, largest first. Equal sizes are ordered by name and layer.
    pub fn live_largest(&self) -> Vec<LiveLease> {
        largest_first(self.records.iter().flatten().map(|record| record.lease))
    }

    /// Leases in device memory that were live at the peak, largest first. Equal sizes are ordered by name and layer.
    pub fn largest_at_peak(&self) -> Vec<LiveLease> {
        let still_live = self
            .records
            .iter()
            .flatten()
            .filter(|record| record.sequence <= self.peak_sequence);
        largest_first(
            still_live
                .map(|record| record.lease)
                .chain(self.freed_since_peak.iter().copied()),
        )
    }
}

fn largest_first(leases: impl Iterator<Item = Lease>) -> Vec<LiveLease> {
    let device = leases.filter(|lease| lease.space == Space::Device);
    let mut live: Vec<LiveLease> = device
        .map(|lease| LiveLease {
            name: lease.name,
            layer: lease.place.layer,
            phase: lease.place.phase,
            category: lease.category,
            bytes: lease.bytes,
        })
        .collect();
    live.sort_by(|a, b| {
        b.bytes
            .cmp(&a.bytes)
            .then(a.name.cmp(b.name))
            .then(a.layer.cmp(&b.layer))
    });
    live
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lease(name: &'static str, category: Category, bytes: u64) -> Lease {
        let place = Place {
            phase: Phase::Forward,
            layer: Layer::Block(0),
        };
        Lease {
            name,
            category,
            place,
            space: Space::Device,
            bytes,
        }
    }

    #[test]
    fn the_peak_remembers_what_was_live_after_it_is_gone() {
        let mut ledger = Ledger::default();
        let weights = ledger.take(lease("weights", Category::Parameter, 1024));
        let gate = ledger.take(lease("gate", Category::Activation, 512));
        let scratch = ledger.take(lease("scratch", Category::Temporary, 256));
        ledger.give_back(scratch);
        ledger.give_back(gate);
        let later = ledger.take(lease("later", Category::Temporary, 256));
        let names: Vec<_> = ledger
            .largest_at_peak()
            .iter()
            .map(|live| live.name)
            .collect();
        assert_eq!(names, ["weights", "gate", "scratch"]);
        assert_eq!(ledger.peak().bytes, 1792);
        assert_eq!(ledger.peak().by_category.total(), 1792);
        assert_eq!(ledger.live_bytes(Space::Device), 1280);
        ledger.give_back(later);
        ledger.begin_step();
        assert_eq!(ledger.peak().bytes, 1024);
        assert_eq!(ledger.largest_at_peak().len(), 1);
        ledger.give_back(weights);
        assert_eq!(ledger.live_leases(), 0);
    }

    #[test]
    fn what_changes_its_category_after_the_peak_keeps_it_in_the_list() {
        let mut ledger = Ledger::default();
        let gate = ledger.take(lease("gate", Category::Activation, 512));
        let scratch = ledger.take(lease("scratch", Category::Temporary, 256));
        ledger.give_back(scratch);
        ledger.recategorize(gate, Category::Temporary);
        assert_eq!(ledger.live_by_category().temporary, 512);
        let at_peak: Vec<_> = ledger
            .largest_at_peak()
            .iter()
            .map(|live| (live.name, live.category))
            .collect();
        assert_eq!(
            at_peak,
            [
                ("gate", Category::Activation),
                ("scratch", Category::Temporary)
            ]
        );
        ledger.give_back(gate);
        assert_eq!(ledger.largest_at_peak().len(), 2);
        assert_eq!(ledger.live_by_category(), ByCategory::default());
    }

    #[test]
    fn a_phase_counts_what_is_live_on_entering_and_on_returning() {
        let mut ledger = Ledger::default();
        let backward = Place {
            phase: Phase::Backward,
            layer: Layer::Block(1),
        };
        let recompute = Place {
            phase: Phase::Recompute,
            layer: Layer::Block(1),
        };
        let kept = ledger.take(lease("kept", Category::Activation, 512));
        let left = ledger.enter(backward);
        assert_eq!(ledger.phase_peaks().backward, 512);
        let before = ledger.enter(recompute);
        let replayed = ledger.take(lease("replayed", Category::Temporary, 256));
        ledger.enter(before);
        assert_eq!(ledger.phase_peaks().recompute, 768);
        assert_eq!(
            ledger.phase_peaks().backward,
            768,
            "the replayed one is live on returning"
        );
        ledger.give_back(kept);
        ledger.give_back(replayed);
        ledger.enter(left);
        assert_eq!(ledger.phase_peaks().load, 512);
    }

    proptest! {
        /// Compares the ledger with a model that keeps every instant.
        #[test]
        fn live_and_peak_follow_a_list_of_all_instants(
            operations in proptest::collection::vec((any::<bool>(), 0usize..8, 1u64..50, 0usize..6), 1..120),
        ) {
            let mut ledger = Ledger::default();
            let mut live: Vec<(usize, u64, Category)> = Vec::new();
            let mut best = (0, ByCategory::default(), 0);
            for (free, index, granules, category) in operations {
                if free && !live.is_empty() {
                    let (number, _, _) = live.remove(index % live.len());
                    ledger.give_back(number);
                } else {
                    let category = Category::ALL[category];
                    let number = ledger.take(lease("x", category, granules * 256));
                    live.push((number, granules * 256, category));
                }
                let mut now = ByCategory::default();
                live.iter().for_each(|(_, bytes, category)| *now.get_mut(*category) += bytes);
                if now.total() > best.0 {
                    best = (now.total(), now, live.len());
                }
                prop_assert_eq!(ledger.live_by_category(), now);
            }
            prop_assert_eq!(ledger.peak().bytes, best.0);
            prop_assert_eq!(ledger.peak().by_category, best.1);
            let at_peak = ledger.largest_at_peak();
            prop_assert_eq!(at_peak.len(), best.2);
            prop_assert_eq!(at_peak.iter().map(|live| live.bytes).sum::<u64>(), best.0);
        }
    }
}
