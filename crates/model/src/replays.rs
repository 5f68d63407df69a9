//! How often stages were replayed.

use serde::ser::{SerializeMap, Serializer};

/// How often each stage was replayed, by name, in forward order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplayCounts(Vec<(&'static str, usize)>);

impl ReplayCounts {
    /// Counts of zero for these stages.
    pub(crate) fn none(stages: Vec<&'static str>) -> ReplayCounts {
        ReplayCounts(stages.into_iter().map(|name| (name, 0)).collect())
    }

    /// Counts a replay.
    pub(crate) fn add(&mut self, stage: &'static str) {
        let count = self.0.iter_mut().find(|(name, _)| *name == stage);
        count
            .expect("a model counts the replays of its own stages")
            .1 += 1;
    }

    /// Adds the counts of another micro-batch of the same model.
    pub(crate) fn add_all(&mut self, other: &ReplayCounts) {
        let pairs = self.0.iter_mut().zip(&other.0);
        pairs.for_each(|(count, more)| count.1 += more.1);
    }

    /// Replays of one stage.
    pub fn get(&self, stage: &str) -> usize {
        let count = self.0.iter().find(|(name, _)| *name == stage);
        count.map_or(0, |(_, count)| *count)
    }

    /// Replays of all stages.
    pub fn total(&self) -> usize {
        self.0.iter().map(|(_, count)| count).sum()
    }
}

impl serde::Serialize for ReplayCounts {
    /// A map from stage name to count, without zeros.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut counted = self.0.iter().filter(|(_, count)| *count > 0);
        let mut map = serializer.serialize_map(None)?;
        counted.try_for_each(|(name, count)| map.serialize_entry(name, count))?;
        map.end()
    }
}
