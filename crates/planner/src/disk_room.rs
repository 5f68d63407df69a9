//! Whether a disk will hold what a run keeps there, asked before anything is loaded.

use memory::format_bytes;
use std::path::{Path, PathBuf};

/// What helps where a disk is short.
const KEEP_LESS: &str = "name a folder on another disk with --offload-optimizer, free some space, or keep less there: --state-dtype \
                         8bit, --master bf16-split or a lower offload.fraction";

/// A disk that has too little space.
#[derive(Debug, thiserror::Error)]
#[error(
    "this run keeps {} of optimizer states in {}, but that disk has {} free",
    format_bytes(*needed_bytes), folder.display(), format_bytes(*free_bytes)
)]
pub struct NoDiskRoom {
    /// Bytes of the files.
    pub needed_bytes: u64,
    /// Bytes that may be written there.
    pub free_bytes: u64,
    /// Where they would be.
    pub folder: PathBuf,
}

impl NoDiskRoom {
    /// What helps.
    pub fn hint(&self) -> &'static str {
        KEEP_LESS
    }

    /// Refuses a run that keeps so many bytes in a folder whose disk has not got them. A system that does not tell refuses
    /// nothing: the files are reserved when they are made.
    ///
    /// # Errors
    /// [`NoDiskRoom`].
    pub fn check(folder: &Path, needed_bytes: u64) -> Result<(), NoDiskRoom> {
        match scratch::free_bytes(folder) {
            Ok(free_bytes) if free_bytes < needed_bytes => Err(NoDiskRoom {
                needed_bytes,
                free_bytes,
                folder: folder.into(),
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::NoDiskRoom;

    #[test]
    fn more_than_is_free_is_refused_also_in_a_folder_that_is_still_to_be_made() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("states");
        NoDiskRoom::check(&folder, 1).unwrap();
        let refused = NoDiskRoom::check(&folder, 1 << 60).unwrap_err();
        let text = format!("{refused}; {}", refused.hint());
        for words in ["keeps 1024 PiB", "states", "free", "another disk"] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(!folder.exists(), "it was only asked for");
    }
}
