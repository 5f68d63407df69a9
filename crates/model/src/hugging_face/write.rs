//! Writes a model's folder in Hugging Face layout, so that an incomplete one is never taken for a model.

use super::adapter::{ADAPTER_CONFIG, ADAPTER_STEM};
use super::error::WeightsError;
use files::{FileSystem, FilesError, TensorSource, remove_tree, write_file, write_tensors};
use std::io;
use std::path::Path;

/// The most bytes of weights in a file, unless one tensor has more.
pub const MAX_SHARD_BYTES: u64 = 5_000_000_000;

/// The folder, within the model's, in which a model is written before its files are moved.
const UNFINISHED: &str = ".unfinished";

/// Writes weights and the other files of a model ([`Origin::files`](crate::Origin::files)) into an existing folder.
/// They are written and made durable in a folder within it, and then moved, `config.json` last. After a crash there is
/// no new `config.json`, and no file is half written. Files of the same names are replaced.
///
/// # Errors
/// [`WeightsError::Write`]. Files that were not moved yet are then removed.
pub fn write_model(
    disk: &dyn FileSystem,
    folder: &Path,
    files: &[(String, Vec<u8>)],
    weights: &dyn TensorSource,
    max_shard_bytes: u64,
) -> Result<(), WeightsError> {
    let tensors = (MODEL, weights, max_shard_bytes);
    write_folder(disk, folder, files, tensors)
}

/// The name, without its ending, of the file with a model's weights.
const MODEL: &str = "model";

/// As [`write_model`], for an adapter's folder, whose `files` end with what readers take it by.
///
/// # Errors
/// As [`write_model`].
pub fn write_adapter(
    disk: &dyn FileSystem,
    folder: &Path,
    files: &[(String, Vec<u8>)],
    factors: &dyn TensorSource,
) -> Result<(), WeightsError> {
    write_folder(disk, folder, files, (ADAPTER_STEM, factors, u64::MAX))
}

fn write_folder(
    disk: &dyn FileSystem,
    folder: &Path,
    files: &[(String, Vec<u8>)],
    tensors: (&str, &dyn TensorSource, u64),
) -> Result<(), WeightsError> {
    let unfinished = folder.join(UNFINISHED);
    clear(disk, &unfinished).map_err(WeightsError::Write)?;
    let write = || {
        let names = write_apart(disk, &unfinished, files, tensors)?;
        move_all(disk, &unfinished, folder, &names)
    };
    write().map_err(|error| {
        // Report why writing failed, even if clearing fails too.
        let _ = clear(disk, &unfinished);
        WeightsError::Write(error)
    })
}

/// Removes what an earlier crash left.
fn clear(disk: &dyn FileSystem, unfinished: &Path) -> Result<(), FilesError> {
    match remove_tree(disk, unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(FilesError::at("remove", unfinished)(error))
        }
        _ => Ok(()),
    }
}

/// Writes all files into a new folder; returns their names, `config.json` last.
fn write_apart(
    disk: &dyn FileSystem,
    unfinished: &Path,
    files: &[(String, Vec<u8>)],
    (stem, weights, max_shard_bytes): (&str, &dyn TensorSource, u64),
) -> Result<Vec<String>, FilesError> {
    disk.create_folder(unfinished)
        .map_err(FilesError::at("make", unfinished))?;
    let tensors = write_tensors(disk, unfinished, stem, weights, max_shard_bytes)?;
    let mut names: Vec<String> = tensors.into_iter().map(|file| file.name).collect();
    for (name, bytes) in files {
        write_file(disk, unfinished, name, bytes)?;
        names.push(name.clone());
    }
    disk.sync_folder(unfinished)
        .map_err(FilesError::at("write", unfinished))?;
    names.sort_by_key(|name| CONFIGS.contains(&&name[..]));
    Ok(names)
}

/// Readers take a folder with one of these files for a model's, or for an adapter's.
const CONFIGS: [&str; 2] = ["config.json", ADAPTER_CONFIG];

/// Moves the files out of their folder and removes it. All other names are durable before `config.json` gets its own.
fn move_all(
    disk: &dyn FileSystem,
    from: &Path,
    to: &Path,
    names: &[String],
) -> Result<(), FilesError> {
    let sync = || disk.sync_folder(to).map_err(FilesError::at("write", to));
    for name in names {
        if CONFIGS.contains(&&name[..]) {
            sync()?;
        }
        let target = to.join(name);
        disk.rename(&from.join(name), &target)
            .map_err(FilesError::at("write", &target))?;
    }
    sync()?;
    disk.remove_folder(from)
        .map_err(FilesError::at("remove", from))
}
