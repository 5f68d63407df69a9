//! `manifest.json`, which lists the files of a checkpoint.

use crate::error::Damage;
use crate::state::{LATEST_VERSION, TrainerState};
use files::{WrittenFile, is_plain_name};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// The file's name.
pub(crate) const MANIFEST_FILE: &str = "manifest.json";

/// All files of a checkpoint except the manifest itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The format version of the checkpoint's state.
    pub format_version: u64,
    /// The step after which it was saved.
    pub step: u64,
    /// Its files, each once.
    pub files: Vec<ManifestFile>,
}

/// A file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestFile {
    /// Its name, without a path.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// CRC-32 of its bytes, as eight hexadecimal digits.
    pub crc32: String,
}

/// Why a manifest cannot be used.
pub(crate) enum Unbelievable {
    /// It has a later format.
    Newer(u64),
    /// It is damaged.
    Damaged(Damage),
}

impl From<&WrittenFile> for ManifestFile {
    fn from(file: &WrittenFile) -> Self {
        Self {
            name: file.name.clone(),
            bytes: file.bytes,
            crc32: digits(file.crc32),
        }
    }
}

/// A checksum as text.
pub(crate) fn digits(crc32: u32) -> String {
    format!("{crc32:08x}")
}

/// The last key of the file: the checksum of all bytes before it.
fn tail(body: &[u8]) -> String {
    format!(
        ",\n  \"crc32\": \"{}\"\n}}\n",
        digits(crc32fast::hash(body))
    )
}

impl Manifest {
    pub(crate) fn new(state: &TrainerState, files: &[WrittenFile]) -> Self {
        Self {
            format_version: state.format_version,
            step: state.step,
            files: files.iter().map(ManifestFile::from).collect(),
        }
    }

    /// The file's text. Its last key is the checksum of everything before it.
    pub(crate) fn text(&self) -> String {
        let text = serde_json::to_string_pretty(self).expect("names and numbers are JSON");
        let body = text
            .strip_suffix("\n}")
            .expect("an object that has keys ends so");
        format!("{body}{}", tail(body.as_bytes()))
    }

    /// Reads the file's text.
    pub(crate) fn parse(text: &[u8]) -> Result<Manifest, Unbelievable> {
        #[derive(Deserialize)]
        struct Version {
            format_version: u64,
        }
        if let Ok(Version { format_version }) = serde_json::from_slice(text)
            && format_version > LATEST_VERSION
        {
            return Err(Unbelievable::Newer(format_version));
        }
        let damaged = |reason: &str| Unbelievable::Damaged(Damage::Manifest(reason.into()));
        let body = text
            .len()
            .checked_sub(tail(b"").len())
            .map(|end| &text[..end]);
        let body = body.ok_or_else(|| damaged("it is cut short"))?;
        if tail(body).as_bytes() != &text[body.len()..] {
            return Err(damaged("its checksum is not that of its text"));
        }
        let manifest: Manifest =
            serde_json::from_slice(text).map_err(|error| damaged(&error.to_string()))?;
        let mut seen = HashSet::from([MANIFEST_FILE]);
        for ManifestFile { name, .. } in &manifest.files {
            if !is_plain_name(name) || !seen.insert(name) {
                return Err(damaged(&format!(
                    "`{name}` is no name of a file, or there twice"
                )));
            }
        }
        Ok(manifest)
    }
}
