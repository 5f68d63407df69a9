//! What a resumed run may change without computing something else than the run before.

use super::dotted;
use super::error::ConfigError;
use super::keys::KEYS;
use super::schema::Config;
use optim::ScheduleKind;
use toml::{Table, Value};

/// Sections and keys that change where bytes lie, what is recorded and how fast a run is, and no bit of what it computes.
const HARMLESS: [&str; 13] = [
    "recompute.",
    "offload.",
    "eval.",
    "checkpoint.",
    "hardware.",
    "log.",
    "memory.limit",
    "memory.budget",
    "memory.force",
    "train.threads",
    "train.max_skipped",
    "data.prefetch",
    // Whether it is the same data, its own fingerprint says.
    "data.path",
];

/// A key whose change alters what is computed.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The key.
    pub key: &'static str,
    /// What it was, as TOML.
    pub before: String,
    /// What it is now.
    pub now: String,
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{}: {} before, {} now", self.key, self.before, self.now)
    }
}

impl Config {
    /// The keys in which a run computes something else than one with the configuration `before`.
    ///
    /// # Errors
    /// A value that TOML cannot express.
    pub fn changes_since(&self, before: &Config) -> Result<Vec<Change>, ConfigError> {
        let (was, is) = (Table::try_from(before)?, Table::try_from(self)?);
        let show = |table, key| {
            dotted::get(table, key).map_or_else(|| "not set".to_owned(), Value::to_string)
        };
        let matters = |key: &str| match key {
            "train.steps" => self.lr.depends_on_steps() || before.lr.depends_on_steps(),
            _ => !HARMLESS.iter().any(|harmless| key.starts_with(harmless)),
        };
        let keys = KEYS.iter().map(|key| key.name).filter(|key| matters(key));
        let changes = keys.map(|key| Change {
            key,
            before: show(&was, key),
            now: show(&is, key),
        });
        Ok(changes
            .filter(|change| change.before != change.now)
            .collect())
    }
}

impl super::LrConfig {
    /// Whether the rate of a step depends on how many steps there are.
    fn depends_on_steps(&self) -> bool {
        match self.schedule {
            ScheduleKind::Constant => false,
            ScheduleKind::Linear | ScheduleKind::Cosine => self.decay_steps.is_none(),
            ScheduleKind::Wsd => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changes(set: &[&str]) -> Vec<&'static str> {
        let before = Config::default();
        let set: Vec<String> = set.iter().map(ToString::to_string).collect();
        let now = before.with(&set).unwrap();
        let changes = now.changes_since(&before).unwrap();
        changes.iter().map(|change| change.key).collect()
    }

    #[test]
    fn what_never_changes_a_bit_may_change() {
        let harmless = [
            "recompute.spec=full",
            "offload.optimizer=/scratch",
            "offload.parameters=pinned",
            "offload.gradients=pinned",
            "train.threads=3",
            "data.prefetch=9",
            "train.steps=5000",
            "eval.every=5",
            "checkpoint.every=7",
            "log.every=3",
        ];
        assert_eq!(changes(&harmless), [""; 0]);
    }

    #[test]
    fn what_does_is_named() {
        let set = ["lr.peak=1", "memory.head_chunk=64", "batch.accum=2"];
        let named = ["batch.accum", "lr.peak", "memory.head_chunk"];
        assert_eq!(changes(&set), named);
        // Tiles change the order of sums; with release, what is not finite is not known before the first update.
        let set = ["memory.tile_tokens=64", "optim.release=backward"];
        let without_clipping = [&set[..], &["optim.clip_norm=inf"]].concat();
        let named = ["optim.clip_norm", "optim.release", "memory.tile_tokens"];
        assert_eq!(changes(&without_clipping), named);
        // A number of steps matters where the rate falls towards the last one.
        let wsd = ["train.steps=5000", "lr.schedule=wsd"];
        assert_eq!(changes(&wsd), ["train.steps", "lr.schedule"]);
    }
}
