//! Files that are kept for all of a user's runs.

use crate::failure::{Failure, Result};
use serde::Serialize;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The trainer's folder for them; none without a folder for caches.
pub(crate) fn folder() -> Option<PathBuf> {
    let folder = |name| {
        let value = std::env::var_os(name).filter(|value: &OsString| !value.is_empty());
        value.map(PathBuf::from)
    };
    let caches = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))?;
    Some(caches.join("trainer"))
}

/// A GPU's name as a part of a file's.
pub(crate) fn plain(gpu: &str) -> String {
    let plain = |letter: char| match letter.is_ascii_alphanumeric() {
        true => letter.to_ascii_lowercase(),
        false => '-',
    };
    gpu.chars().map(plain).collect()
}

/// Writes a value as JSON. The file is never left half written.
///
/// # Errors
/// [`Failure::File`].
pub(crate) fn write(path: &Path, value: &impl Serialize) -> Result {
    let text = serde_json::to_string_pretty(value);
    let text = text.map_err(|error| Failure::Usage(error.to_string()))? + "\n";
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let written = || {
        std::fs::create_dir_all(folder)?;
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(path).map_err(|refused| refused.error)
    };
    written().map(drop).map_err(Failure::file(path))
}
