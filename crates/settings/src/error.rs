//! Errors in a configuration or a command line.

/// Refuses settings that do not go together. The sentence says which, and what to do.
pub(crate) fn refused<T>(sentence: impl Into<String>) -> Result<T, ConfigError> {
    Err(ConfigError::Contradiction(sentence.into()))
}

/// The same where a flag brings something that does not go with others. `off` is the flag that turns it off.
pub(crate) fn not_with(brings: &str, others: &str, off: &str) -> Result<(), ConfigError> {
    refused(format!("{brings}, and {others}, or {off}"))
}

/// Bad usage or configuration (exit code 2). The text says what was wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A key that does not exist.
    #[error("unknown key `{key}` in {place}{}", question(*nearest))]
    UnknownKey {
        /// The key.
        key: String,
        /// The file, preset or flag that has it.
        place: String,
        /// The existing key that may be meant.
        nearest: Option<&'static str>,
    },
    /// A name that is neither a preset nor a file.
    #[error("no preset is called `{name}` and no such file exists{}", question(*nearest))]
    UnknownPreset {
        /// The name.
        name: String,
        /// The preset that may be meant.
        nearest: Option<&'static str>,
    },
    /// A file that cannot be read.
    #[error("cannot read the configuration {path}: {source}")]
    Unreadable {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// A text that is not TOML.
    #[error("{place} is not a valid configuration: {message}")]
    Syntax {
        /// The file, preset or flag.
        place: String,
        /// Where in it the error is, and what the parser says.
        message: String,
    },
    /// A value of the wrong type or out of its range.
    #[error("`{key}` is {value} in {place}; it must be {expected}")]
    Value {
        /// The key.
        key: String,
        /// The value, as TOML.
        value: String,
        /// The file, preset or flag that has it.
        place: String,
        /// What the value must be.
        expected: String,
    },
    /// A `--set` that is not an assignment.
    #[error("`--set {0}` sets nothing; write --set section.key=value")]
    NotAnAssignment(String),
    /// Required keys are missing.
    #[error("`{key}` is missing in {place}; {rule}")]
    Missing {
        /// The first missing key.
        key: String,
        /// The file or preset.
        place: String,
        /// Why it is required.
        rule: &'static str,
    },
    /// Two settings of the command line that contradict each other.
    #[error("{first} and {second} contradict each other: both set `{key}`; keep one of them")]
    Conflict {
        /// The key that both set.
        key: String,
        /// The first setting, as given.
        first: String,
        /// The second setting, as given.
        second: String,
    },
    /// An invalid recompute specification.
    #[error(transparent)]
    Recompute(#[from] model::SpecError),
    /// Labels that cannot be offloaded.
    #[error(transparent)]
    Offload(#[from] model::OffloadError),
    /// A pattern that matches no parameter's name.
    #[error(
        "`{pattern}` in {key} fits no parameter of this model; the nearest is `{nearest}`, and * stands for any characters"
    )]
    NoSuchParameter {
        /// The key.
        key: &'static str,
        /// The pattern.
        pattern: String,
        /// The parameter with the most similar name.
        nearest: String,
    },
    /// Contradictory settings.
    #[error("{0}")]
    Contradiction(String),
    /// A feature that a binary without CUDA lacks.
    #[error(
        "{what} is not available: this binary was built without CUDA (cargo build --release --features cuda){rest}"
    )]
    NotBuilt {
        /// The setting or flag, as given.
        what: String,
        /// The end of the sentence, which says what to do.
        rest: &'static str,
    },
    /// fp16 was asked for.
    #[error(
        "`{key}` is fp16 in {place}, which is not offered: bf16 has f32's range, so no loss \
         scaling is needed; use bf16 or f32"
    )]
    Fp16 {
        /// The key.
        key: String,
        /// The file, preset or flag that has it.
        place: String,
    },
    /// Sizes that make no valid model.
    #[error(transparent)]
    Model(#[from] model::ModelConfigError),
    /// The configuration cannot be written.
    #[error("the configuration cannot be written as TOML: {0}")]
    Unwritable(#[from] toml::ser::Error),
}

/// A clause that asks whether the nearest name was meant.
fn question(nearest: Option<&str>) -> String {
    nearest.map_or(String::new(), |name| format!("; did you mean `{name}`?"))
}
