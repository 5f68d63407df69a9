//! What the ranks of a run must have alike.

use super::Prepared;
use super::resuming::Resumed;
use crate::failure::Failure;
use crate::job::Job;
use settings::{ConfigError, StatesPlace};
use std::collections::BTreeMap;
use toml::{Table, Value};

/// Settings that ranks may have of their own: what a machine has, and where it keeps things. Whether it is the same data, its
/// fingerprint says.
const OWN: [&str; 12] = [
    "train.device",
    "train.threads",
    "memory.limit",
    "memory.budget",
    "memory.force",
    "data.path",
    "data.prefetch",
    "eval.path",
    "offload.path",
    "offload.optimizer",
    "recompute.costs",
    "hardware.",
];

impl Prepared {
    /// Names and values that must be the same on every rank.
    ///
    /// # Errors
    /// A value that TOML cannot express.
    pub(super) fn facts(&self, job: &Job) -> Result<BTreeMap<String, String>, Failure> {
        let (config, options) = (&self.resolved.config, &self.resolved.options);
        let table = Table::try_from(config).map_err(ConfigError::from)?;
        let mut facts = BTreeMap::new();
        flatten("", &table, &mut facts);
        facts.retain(|key, _| !OWN.iter().any(|own| key.starts_with(own)));
        let layout = self.settings.layout(&self.settings.architecture())?;
        let (elements, units) = (layout.elements(), layout.units().len());
        let goes_on = self.resumed.as_ref().map(Resumed::state);
        let others = [
            ("version", Some(env!("CARGO_PKG_VERSION").into())),
            ("the engine", job.engine()),
            ("the device", Some(self.device.target().name().into())),
            (
                "a layout of",
                Some(format!("{elements} elements in {units} units")),
            ),
            ("the data", Some(self.dataset.fingerprint())),
            (
                "optimizer states",
                Some(place(&self.settings.offload.states).into()),
            ),
            (
                "--init-from",
                options.init_from.as_ref().map(|_| "given".into()),
            ),
            (
                "--save-final",
                options.save_final.as_ref().map(|_| "given".into()),
            ),
            (
                "a checkpoint",
                goes_on.map(|state| format!("after step {}", state.step)),
            ),
        ];
        let others = others
            .into_iter()
            .filter_map(|(name, value)| Some((name.to_owned(), value?)));
        facts.extend(others);
        Ok(facts)
    }
}

fn place(states: &StatesPlace) -> &'static str {
    match states {
        StatesPlace::Device => "on the device",
        StatesPlace::Pinned => "pinned",
        StatesPlace::Disk(_) => "on a disk",
    }
}

/// Every value, under its dotted key.
fn flatten(prefix: &str, table: &Table, into: &mut BTreeMap<String, String>) {
    for (name, value) in table {
        let key = format!("{prefix}{name}");
        match value {
            Value::Table(table) => flatten(&format!("{key}."), table, into),
            value => drop(into.insert(key, value.to_string())),
        }
    }
}
