//! How much was live over a trace, as a picture needs it.

use crate::snapshot::{BEFORE, Groups, MemorySnapshot, SnapshotError, TraceChange};

/// Layers that a picture distinguishes, the last of which is all the rest.
const LAYERS_MAX: usize = 8;

/// The live bytes of a device over its trace.
#[derive(Debug)]
pub struct MemoryCourse {
    /// The names of its layers, largest at the peak first: categories if any are recorded, else places in the code.
    pub layers: Vec<String>,
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

impl MemorySnapshot {
    /// The live bytes of a device over its trace, for a picture of so many columns.
    ///
    /// # Errors
    /// [`SnapshotError::Foreign`].
    pub fn course(&self, device: u32, columns: usize) -> Result<MemoryCourse, SnapshotError> {
        let peaks = self.peaks()?;
        let peak = peaks.into_iter().find(|peak| peak.device == device);
        let unknown = || SnapshotError::Foreign(format!("there is no device {device}"));
        let peak = peak.ok_or_else(unknown)?;
        let knows_categories = peak.by_category.keys().any(|name| name != "unknown");
        let mut layers: Vec<String> = match knows_categories {
            true => peak.by_category.keys().cloned().collect(),
            false => {
                let mut places: Vec<String> = Vec::new();
                for group in &peak.live {
                    if places.len() < LAYERS_MAX - 1 && !places.contains(&group.place) {
                        places.push(group.place.clone());
                    }
                }
                places
            }
        };
        layers.truncate(LAYERS_MAX - 1);
        layers.push("all else".into());
        let times = self.times(device);
        let mut groups = Groups::default();
        let mut layer_of: Vec<usize> = Vec::new();
        let mut live = vec![0_i64; layers.len()];
        let rest = layers.len() - 1;
        let mut layer = |groups: &Groups, group: usize| {
            while layer_of.len() <= group {
                let name = &groups.names[layer_of.len()];
                let name = if knows_categories {
                    &name.category
                } else {
                    &name.place
                };
                layer_of.push(
                    layers
                        .iter()
                        .position(|layer| layer == name)
                        .unwrap_or(rest),
                );
            }
            layer_of[group]
        };
        // Only the end tells which blocks were live before. Groups get the same numbers each time.
        let events = self.trace(device).len();
        let mut moments: Vec<(usize, f64, Vec<i64>)> = Vec::new();
        let before = self.follow(device, &mut groups, |_, _, _| {})?;
        let unseen = layers
            .iter()
            .position(|layer| layer == BEFORE)
            .unwrap_or(rest);
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
            layers,
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
