//! How much was live over a trace, as a picture needs it.

use crate::peak::RecordedPeak;
use crate::snapshot::{BEFORE, Groups, MemorySnapshot, SnapshotError, TraceChange};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Layers that a picture distinguishes, the last of which is all the rest.
const LAYERS_MAX: usize = 8;

/// What stays over steps, in the order in which timelines of steps stack it.
const STAYS: [&str; 4] = [BEFORE, "parameter", "gradient", "optimizer_state"];

/// What a picture tells apart.
#[derive(Clone, Debug)]
pub struct Layers {
    /// Their names, from the bottom up: what stays over steps, then what is largest at a peak. The last one is all the rest.
    pub names: Vec<String>,
    /// Whether they are categories, which is so if all peaks have some. Otherwise they are places in the code.
    pub are_categories: bool,
}

impl Layers {
    /// The layers of a picture with these peaks.
    pub fn of(peaks: &[&RecordedPeak]) -> Layers {
        let has_categories =
            |peak: &&RecordedPeak| peak.by_category.keys().any(|name| name != "unknown");
        let are_categories = peaks.iter().all(has_categories);
        let mut most: BTreeMap<&str, u64> = BTreeMap::new();
        for peak in peaks {
            let mut of_peak: BTreeMap<&str, u64> = BTreeMap::new();
            for group in &peak.live {
                let name = match are_categories {
                    true => &group.category,
                    false => &group.place,
                };
                *of_peak.entry(name).or_default() += group.bytes;
            }
            for (name, bytes) in of_peak {
                let most = most.entry(name).or_default();
                *most = bytes.max(*most);
            }
        }
        let mut names: Vec<&str> = most.keys().copied().collect();
        names.sort_by_key(|name| Reverse(most[name]));
        names.truncate(LAYERS_MAX - 1);
        let place = |name: &&str| STAYS.iter().position(|stays| stays == name);
        names.sort_by_key(|name| place(name).unwrap_or(STAYS.len()));
        let mut names: Vec<String> = names.into_iter().map(String::from).collect();
        names.push("all else".into());
        Layers {
            names,
            are_categories,
        }
    }
}

/// The live bytes of a device over its trace.
#[derive(Debug)]
pub struct MemoryCourse {
    /// Its layers.
    pub layers: Layers,
    /// In order, at most two for each column of the picture: the highest of the column, and its last one.
    pub moments: Vec<LiveMoment>,
    /// The length in seconds; none if events have no times.
    pub seconds: Option<f64>,
    /// Events.
    pub events: usize,
}

/// The live bytes at a moment.
#[derive(Clone, Debug, PartialEq)]
pub struct LiveMoment {
    /// How far into the trace, from 0 to 1: by time, or by events if they have no times.
    pub at: f64,
    /// Live bytes of each layer.
    pub bytes: Vec<u64>,
}

impl LiveMoment {
    /// Live bytes.
    pub fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }
}

impl MemoryCourse {
    /// The moment with the most live bytes, the last of them.
    pub fn highest(&self) -> Option<&LiveMoment> {
        self.moments.iter().max_by_key(|moment| moment.total())
    }
}

impl MemorySnapshot {
    /// The live bytes of a device over its trace, for a picture of these layers and of so many columns.
    ///
    /// # Errors
    /// [`SnapshotError::Foreign`].
    pub fn course(
        &self,
        device: u32,
        layers: &Layers,
        columns: usize,
    ) -> Result<MemoryCourse, SnapshotError> {
        let names = &layers.names;
        let times = self.times(device);
        let mut groups = Groups::default();
        let mut layer_of: Vec<usize> = Vec::new();
        let mut live = vec![0_i64; names.len()];
        let rest = names.len() - 1;
        let mut layer = |groups: &Groups, group: usize| {
            while layer_of.len() <= group {
                let name = &groups.names[layer_of.len()];
                let name = match layers.are_categories {
                    true => &name.category,
                    false => &name.place,
                };
                let layer = names.iter().position(|layer| layer == name);
                layer_of.push(layer.unwrap_or(rest));
            }
            layer_of[group]
        };
        // Only the end tells which blocks were live before. Groups get the same numbers each time.
        let events = self.trace(device).len();
        let mut moments: Vec<(usize, f64, Vec<i64>)> = Vec::new();
        let before = self.follow(device, &mut groups, |_, _, _| {})?;
        let unseen = names.iter().position(|layer| layer == BEFORE);
        let unseen = unseen.unwrap_or(rest);
        live[unseen] += before.freed_bytes;
        for (group, bytes) in &before.kept {
            live[layer(&groups, *group)] += bytes;
        }
        moments.push((0, 0.0, live.clone()));
        self.follow(device, &mut Groups::default(), |number, entry, change| {
            match change {
                TraceChange::Began(allocation) => {
                    live[layer(&groups, allocation.group)] += allocation.bytes
                }
                TraceChange::Ended(allocation) => {
                    live[layer(&groups, allocation.group)] -= allocation.bytes
                }
                TraceChange::EndedFromBefore(bytes) => live[unseen] -= bytes,
                TraceChange::Waits(_) | TraceChange::Reserved(_) => return,
            }
            let at = match (times, self.time_us(entry)) {
                (Some((first, last)), Some(now)) => (now - first) as f64 / (last - first) as f64,
                _ => number as f64 / events as f64,
            };
            keep(
                &mut moments,
                ((at * columns as f64) as usize, at, live.clone()),
            );
        })?;
        let bytes = |live: Vec<i64>| live.into_iter().map(|bytes| bytes.max(0) as u64).collect();
        Ok(MemoryCourse {
            layers: layers.clone(),
            moments: moments
                .into_iter()
                .map(|(_, at, live)| LiveMoment {
                    at,
                    bytes: bytes(live),
                })
                .collect(),
            seconds: times.map(|(first, last)| (last - first) as f64 * 1e-6),
            events,
        })
    }

    /// The first and the last time of a trace whose events all have one, and in order.
    fn times(&self, device: u32) -> Option<(i64, i64)> {
        let mut times = self.trace(device).iter().map(|entry| self.time_us(*entry));
        let first = times.next()??;
        let mut last = first;
        for time in times {
            let time = time.filter(|time| *time >= last)?;
            last = time;
        }
        (last > first).then_some((first, last))
    }
}

/// Adds a moment: of a column the highest and the last one stay.
fn keep(moments: &mut Vec<(usize, f64, Vec<i64>)>, moment: (usize, f64, Vec<i64>)) {
    let total = |moment: &(usize, f64, Vec<i64>)| moment.2.iter().sum::<i64>();
    let of_column = moments
        .iter()
        .rev()
        .take_while(|kept| kept.0 == moment.0)
        .count();
    if of_column >= 2 {
        let last = moments.len() - 1;
        if total(&moments[last]) > total(&moments[last - 1]) {
            moments.remove(last - 1);
        } else {
            moments.pop();
        }
    }
    moments.push(moment);
}
