//! Measured times of operations: what `trainer profile --json` printed.

use kernels::timeline::Measured;
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// A file of measured times that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{} holds no measured times ({why}); write one with `trainer profile --json > {}` and the same settings", path.display(), path.display())]
pub struct CostsError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub why: String,
}

/// The part of a profile that counts.
#[derive(Deserialize)]
struct Profile {
    operations: Vec<Operations>,
}

#[derive(Deserialize)]
struct Operations {
    operation: String,
    sizes: Vec<usize>,
    calls: usize,
    ms: f64,
}

/// Reads a profile; nothing where there is none.
///
/// # Errors
/// The file cannot be read, or is no profile.
pub(crate) fn read(path: Option<&Path>) -> Result<Measured, CostsError> {
    let Some(path) = path else {
        return Ok(Measured::new());
    };
    let wrong = |why: String| CostsError {
        path: path.into(),
        why,
    };
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let profile: Profile = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    let of_call = |sum: Operations| {
        let seconds = sum.ms / 1e3 / sum.calls.max(1) as f64;
        ((sum.operation, sum.sizes), seconds)
    };
    let measured: Measured = profile.operations.into_iter().map(of_call).collect();
    match measured
        .values()
        .all(|seconds| seconds.is_finite() && *seconds >= 0.0)
    {
        true if !measured.is_empty() => Ok(measured),
        _ => Err(wrong("no operations with their times".into())),
    }
}
