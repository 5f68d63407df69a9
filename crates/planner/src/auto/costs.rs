//! Reads measured times of operations, which `trainer profile --json` prints.

use kernels::Target;
use kernels::timeline::Measured;
use memory::DType;
use model::ModelConfig;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use settings::load::{Source, load};
use settings::{Config, KernelChoice, KernelFamily, Settings, preset};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A file of measured times that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{} {why}; write one with `{command} > {}`", path.display(), path.display())]
pub struct CostsError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub why: String,
    /// The command that prints the times for this run.
    pub command: String,
}

/// The fields of a profile that are read.
#[derive(Deserialize)]
struct Profile {
    measured_for: Option<MeasuredFor>,
    operations: Vec<Operations>,
}

#[derive(Deserialize)]
struct Operations {
    operation: String,
    sizes: Vec<usize>,
    calls: usize,
    ms: f64,
}

/// The settings that decide the operations of a step and their sizes, by their keys: those of the profiled run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MeasuredFor(BTreeMap<String, String>);

impl MeasuredFor {
    /// The keys and values of these settings.
    pub fn new(settings: &Settings, target: Target) -> MeasuredFor {
        let mut keys = model_keys(&settings.model);
        let others = [
            ("data.seq", settings.seq.to_string()),
            ("batch.micro", settings.micro_batch.to_string()),
            ("train.device", target.name().to_string()),
            ("train.dtype", settings.dtype.as_str().to_string()),
            ("attention.backend", settings.attention.name().to_string()),
        ];
        keys.extend(others.map(|(key, value)| (key.to_string(), value)));
        // Not where it is 1, as in the files of earlier versions.
        let sharing = settings.sharing();
        if sharing.rank.of > 1 {
            keys.insert("parallel.context".into(), sharing.rank.of.to_string());
        }
        if sharing.parts_each > 1 {
            let parts = sharing.parts().to_string();
            keys.insert("parallel.context_parts".into(), parts);
        }
        if settings.state_interval > 1 {
            let interval = settings.state_interval.to_string();
            keys.insert("recompute.state_interval".into(), interval);
        }
        let kernels = kernels(settings, target).into_iter();
        keys.extend(kernels.map(|(key, choice)| (key.into(), choice.name().into())));
        MeasuredFor(keys)
    }

    /// The profile for a run with these kernels: where the run leaves them open, any will do. Files that name none are of kernels for 8.0.
    fn beside(mut self, kernels: Vec<(&str, KernelChoice)>) -> MeasuredFor {
        for (key, choice) in kernels {
            let kind = self
                .0
                .entry(key.into())
                .or_insert(KernelChoice::Sm80.name().into());
            if choice == KernelChoice::Auto {
                *kind = choice.name().into();
            }
        }
        self
    }

    /// The first key that differs between this profile and a run, and how many more do, in words; none if none differs.
    fn differences(&self, run: &MeasuredFor) -> Option<String> {
        let keys: Vec<&String> = run.0.keys().chain(self.0.keys()).collect();
        let differs = |key: &&&String| self.0.get(**key) != run.0.get(**key);
        let mut keys: Vec<&String> = keys.iter().filter(differs).copied().collect();
        keys.sort();
        keys.dedup();
        let first = keys.first()?;
        let value = |of: &MeasuredFor| of.0.get(*first).map_or("none", String::as_str).to_string();
        let others = match keys.len() - 1 {
            0 => String::new(),
            more => format!(", and {more} more differ"),
        };
        Some(format!(
            "was measured with {first} = {}, and this run has {}{others}",
            value(self),
            value(run)
        ))
    }

    /// The command that makes such a profile. It names a preset that has the model, or else sets all keys of the model.
    fn command(&self) -> String {
        let is_model = |key: &str| key.starts_with("model.");
        let of_preset = |name: &'static str| {
            let config = load(&Source::open(name).ok()?, &[], false).ok()?.config;
            Some((name, config))
        };
        let mut presets = preset::names().filter_map(of_preset);
        let has_model = |config: &Config| {
            let keys = model_keys(&config.model);
            let own = self.0.keys().filter(|key| is_model(key)).count();
            own == keys.len()
                && keys
                    .iter()
                    .all(|(key, value)| self.0.get(key) == Some(value))
        };
        let known = presets.find(|(_, config)| has_model(config));
        let mut words = vec!["trainer profile --json".to_string()];
        words.extend(known.as_ref().map(|(name, _)| format!("--config {name}")));
        for (key, value) in &self.0 {
            if !(is_model(key) && known.is_some()) {
                // These characters have a meaning in a shell.
                let is_plain = !value.contains(['"', '{', '[', ' ']);
                let quote = if is_plain { "" } else { "'" };
                words.push(format!("--set {quote}{key}={value}{quote}"));
            }
        }
        words.join(" ")
    }
}

/// The keys of kernels, for operations of a step that have several kinds. A profile names the kind that was timed.
fn kernels(settings: &Settings, target: Target) -> Vec<(&'static str, KernelChoice)> {
    let counts = |family: &KernelFamily| {
        target == Target::Cuda
            && settings.dtype == DType::BF16
            && match family {
                KernelFamily::Attention => !settings.attention.stores_scores(),
                KernelFamily::Experts => settings.model.experts.is_some(),
            }
    };
    let families = KernelFamily::ALL.into_iter().filter(counts);
    families
        .map(|family| (family.key(), settings.kernels[family]))
        .collect()
}

/// The keys of `[model]` that have a value, with the value as `--set` takes it.
fn model_keys(model: &ModelConfig) -> BTreeMap<String, String> {
    let table = serde_json::to_value(model).unwrap_or_default();
    let fields = table.as_object().into_iter().flatten();
    let given = fields.filter(|(_, value)| !value.is_null());
    let keys = given.map(|(key, value)| (format!("model.{key}"), as_toml(value)));
    keys.collect()
}

fn as_toml(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let fields = fields.iter();
            let fields: Vec<String> = fields
                .map(|(key, value)| format!("{key} = {}", as_toml(value)))
                .collect();
            format!("{{{}}}", fields.join(", "))
        }
        other => other.to_string(),
    }
}

/// Reads a profile for these settings; no times without a file.
///
/// # Errors
/// If the file cannot be read, is no profile, or was measured with other settings.
pub(crate) fn read(
    path: Option<&Path>,
    settings: &Settings,
    target: Target,
) -> Result<Measured, CostsError> {
    let Some(path) = path else {
        return Ok(Measured::new());
    };
    let run = MeasuredFor::new(settings, target);
    let wrong = |why: String| CostsError {
        path: path.into(),
        why,
        command: run.command(),
    };
    let no_times = |why: String| wrong(format!("holds no measured times ({why})"));
    let text = files::read_small_text(path).map_err(|error| no_times(error.to_string()))?;
    let profile: Profile =
        serde_json::from_str(&text).map_err(|error| no_times(error.to_string()))?;
    let of_call = |sum: Operations| {
        let seconds = sum.ms / 1e3 / sum.calls.max(1) as f64;
        ((sum.operation, sum.sizes), seconds)
    };
    let measured: Measured = profile.operations.into_iter().map(of_call).collect();
    let are_times = measured
        .values()
        .all(|seconds| seconds.is_finite() && *seconds >= 0.0);
    if !are_times || measured.is_empty() {
        return Err(no_times("no operations with their times".into()));
    }
    match profile.measured_for {
        None => Err(wrong(
            "does not say which model it was measured with".into(),
        )),
        Some(other) => match other.beside(kernels(settings, target)).differences(&run) {
            Some(why) => Err(wrong(why)),
            None => Ok(measured),
        },
    }
}
