//! Changes of a configuration, which know how to write themselves on a command line.

use optim::MasterFormat;
use settings::{Config, ConfigError, Mark, OptimizerPlace, dotted};
use std::sync::Arc;

/// The folder that is suggested for states, beside the run directories. The user will name a faster disk.
const SCRATCH: &str = "./scratch";

/// A new value for a key.
#[derive(Clone)]
struct Put {
    key: &'static str,
    /// The value, as `--set` takes it.
    value: String,
    put: Arc<dyn Fn(&mut Config) + Send + Sync>,
}

/// New values for keys, in the order in which they are set.
#[derive(Clone, Default)]
pub(crate) struct Change(Vec<Put>);

/// `set!(section.key = value)`. A third argument is the text for `--set`, if it differs from the value's own text.
macro_rules! set {
    ($section:ident.$name:ident = $value:expr) => {{
        let value = $value;
        set!($section.$name = value, value)
    }};
    ($section:ident.$name:ident = $value:expr, $text:expr) => {{
        let text = $text.to_string();
        let value = $value;
        let key = concat!(stringify!($section), ".", stringify!($name));
        $crate::change::Change::new(key, text, move |config| {
            config.$section.$name = Clone::clone(&value);
        })
    }};
}
pub(crate) use set;

impl Change {
    /// Called by [`set`].
    pub(crate) fn new(
        key: &'static str,
        value: String,
        put: impl Fn(&mut Config) + Send + Sync + 'static,
    ) -> Change {
        let put = Arc::new(put);
        Change(vec![Put { key, value, put }])
    }

    /// This change followed by another, which takes the place of what both set.
    pub(crate) fn and(&self, other: &Change) -> Change {
        let is_set_again = |one: &&Put| other.0.iter().any(|later| later.key == one.key);
        let kept = self.0.iter().filter(|one| !is_set_again(one));
        Change(kept.chain(&other.0).cloned().collect())
    }

    /// A configuration with the change.
    ///
    /// # Errors
    /// [`ConfigError`] if the command line would refuse the changed configuration.
    pub(crate) fn applied_to(&self, config: &Config) -> Result<Config, ConfigError> {
        let mut config = config.clone();
        self.0.iter().for_each(|one| (one.put)(&mut config));
        config.accepted()
    }

    /// The settings to add, each as `--set` takes it.
    pub(crate) fn set(&self) -> Vec<String> {
        let set = self
            .0
            .iter()
            .map(|one| format!("{}={}", one.key, one.value));
        set.collect()
    }

    /// Whether the loss changes by a bit, if only by the order of sums. A split master has the bits of an f32 one, from
    /// which alone levers change to it.
    pub(crate) fn changes_math(&self) -> bool {
        let keeps_bits = |name| dotted::find(name).is_some_and(|key| key.is(Mark::KeepsBits));
        let exact_master = MasterFormat::Remainder.to_string();
        let is_exact = |one: &Put| one.key == "optim.master" && one.value == exact_master;
        let mut all = self.0.iter();
        all.any(|one| !is_exact(one) && !keeps_bits(one.key))
    }

    /// Whether it sets one of these keys.
    pub(crate) fn sets(&self, keys: &[&str]) -> bool {
        self.0.iter().any(|one| keys.contains(&one.key))
    }

    /// Whether it leaves what the model learns of each sequence.
    pub(crate) fn keeps_learning(&self) -> bool {
        !self.sets(&["data.seq", "optim.clip_norm"])
    }

    /// Whether it divides a value, and may do so again.
    pub(crate) fn halves(&self) -> bool {
        self.sets(&["data.seq", "batch.micro"])
    }

    /// Whether it moves something to host memory.
    pub(crate) fn offloads(&self) -> bool {
        let offloads = |one: &Put| one.key.starts_with("offload.") && one.value != "none";
        self.0.iter().any(offloads)
    }

    /// The same change with optimizer states in a folder; none if it does not move them to host memory.
    pub(crate) fn with_states_on_disk(&self) -> Option<Change> {
        let folder = OptimizerPlace::Folder(SCRATCH.into());
        let on_disk = set!(offload.optimizer = folder, SCRATCH);
        let all = self.0.iter().flat_map(|one| match one.key {
            "offload.optimizer" => on_disk.0.clone(),
            _ => vec![one.clone()],
        });
        self.sets(&["offload.optimizer"])
            .then(|| Change(all.collect()))
    }
}

/// Settings as they are given on the command line.
pub(crate) fn flags(set: &[String]) -> String {
    let flags: Vec<String> = set.iter().map(|one| format!("--set {one}")).collect();
    flags.join(" ")
}

/// What kind of training these settings make of the run.
pub(crate) fn other_training(set: &[String]) -> &'static str {
    match set.iter().any(|one| one.starts_with("lora.rank=")) {
        true => "another training, in which adapters alone learn",
        false => "the same adapters on a model in 4 bits, which is another training",
    }
}

#[cfg(test)]
mod tests {
    use settings::{HostPlace, OptimizerPlace};

    #[test]
    fn states_go_to_a_disk_where_the_host_would_hold_them() {
        let full = set!(recompute.spec = "full".to_string());
        let pinned = full.and(&set!(offload.optimizer = OptimizerPlace::Pinned, "pinned"));
        let on_disk = pinned.with_states_on_disk().unwrap();
        let set = ["recompute.spec=full", "offload.optimizer=./scratch"];
        assert_eq!(full.and(&on_disk).set(), set, "nothing is set twice");
        assert_eq!(on_disk.set(), set);
        let without = set!(offload.parameters = HostPlace::Pinned);
        assert!(without.with_states_on_disk().is_none());
    }
}
