//! Errors in a configuration or a command line.

/// Refuses settings that do not go together. The sentence says which, and what to do.
pub(crate) fn refused<T>(sentence: impl Into<String>) -> Result<T> {
    Err(ConfigError::Contradiction(sentence.into()))
}

/// The same where a flag brings something that does not go with others. `off` is the flag that turns it off.
pub(crate) fn not_with(brings: &str, others: &str, off: &str) -> Result {
    refused(format!("{brings}, and {others}, or {off}"))
}

/// A result with a [`ConfigError`], unless another error is named.
pub type Result<T = (), E = ConfigError> = std::result::Result<T, E>;

/// Bad usage or configuration (exit code 2). The text says what was wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum ConfigError {
    /// A key that does not exist.
    #[error("unknown key `{key}` in {place}{}", question(*nearest))]
    UnknownKey {
        key: String,
        place: String,
        nearest: Option<&'static str>,
    },
    /// A name that is neither a preset nor a file.
    #[error("no preset is called `{name}` and no such file exists{}", question(*nearest))]
    UnknownPreset {
        name: String,
        nearest: Option<&'static str>,
    },
    /// A file that cannot be read.
    #[error("cannot read the configuration {path}: {source}")]
    Unreadable {
        path: String,
        source: std::io::Error,
    },
    /// A text that is not TOML.
    #[error("{place} is not a valid configuration: {message}")]
    Syntax { place: String, message: String },
    /// A value of the wrong type or out of its range.
    #[error("`{key}` is {value} in {place}; it must be {expected}")]
    Value {
        key: String,
        value: String,
        place: String,
        expected: String,
    },
    /// A `--set` that is not an assignment.
    #[error("`--set {0}` sets nothing; write --set section.key=value")]
    NotAnAssignment(String),
    /// Required keys are missing.
    #[error("`{key}` is missing in {place}; {rule}")]
    Missing {
        key: String,
        place: String,
        rule: &'static str,
    },
    /// Two settings of the command line that contradict each other.
    #[error("{first} and {second} contradict each other: both set `{key}`; keep one of them")]
    Conflict {
        key: String,
        first: String,
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
        key: &'static str,
        pattern: String,
        nearest: String,
    },
    /// Contradictory settings.
    #[error("{0}")]
    Contradiction(String),
    /// A feature that a binary without CUDA lacks.
    #[error(
        "{what} is not available: this binary was built without CUDA (cargo build --release --features cuda){rest}"
    )]
    NotBuilt { what: String, rest: &'static str },
    /// fp16 was asked for.
    #[error(
        "`{key}` is fp16 in {place}, which is not offered: bf16 has f32's range, so no loss \
         scaling is needed; use bf16 or f32"
    )]
    Fp16 { key: String, place: String },
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
