//! Opens a checkpoint on the disk, if it is whole.

use crate::Result;
use crate::agree::agree;
use crate::error::{CheckpointError, Damage};
use crate::manifest::{MANIFEST_FILE, Manifest, ManifestFile, Unbelievable, digits};
use crate::names::Name;
use crate::state::{LATEST_VERSION, STATE_FILE, TrainerState};
use collectives::{Alone, Group};
use files::{Disk, FileSystem, FilesError, Tensors};
use rayon::prelude::*;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Files are hashed in parallel, in pieces of this size.
const PIECE_BYTES: u64 = 64 << 20;

/// A checkpoint that was whole when it was opened.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its folder.
    pub path: PathBuf,
    /// The state of the run.
    pub state: TrainerState,
    manifest: Manifest,
}

impl Checkpoint {
    /// Opens a checkpoint's folder, and verifies the size and checksum of every file.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`], which names the file, [`CheckpointError::Newer`], or [`CheckpointError::Files`].
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_together(path, &Alone)
    }

    /// The same on all ranks of a group, each of which verifies some of the files. All ranks get the same verdict.
    ///
    /// # Errors
    /// As [`Checkpoint::open`], [`CheckpointError::OtherRank`] for what another rank found, and
    /// [`CheckpointError::Group`] if ranks are lost.
    pub fn open_together(path: &Path, group: &dyn Group) -> Result<Self> {
        agree(group, Self::open_share(path, (group.rank(), group.size())))
    }

    /// Whether all files of a folder have the manifest's sizes, and `file` is one of them and has its checksum. Only
    /// this thread computes the checksum, because the settings in that file may decide the number of threads.
    pub(crate) fn seems_whole(path: &Path, file: &str) -> bool {
        let Ok(manifest) = read_manifest(path) else {
            return false;
        };
        let checksum = || hash_of(File::open(path.join(file))?).map(|hash| digits(hash.finalize()));
        let listed = manifest.files.iter().find(|listed| listed.name == file);
        verify_sizes(path, &manifest).is_ok()
            && listed.is_some_and(|listed| checksum().is_ok_and(|found| found == listed.crc32))
    }

    /// Verifies the sizes of all files, and the checksums of every `size`-th one, from number `rank` on. Other ranks
    /// verify the others.
    fn open_share(path: &Path, (rank, size): (usize, usize)) -> Result<Self> {
        let damaged = |damage| CheckpointError::Damaged {
            path: path.into(),
            damage,
        };
        let manifest = read_manifest(path)?;
        verify_sizes(path, &manifest)?;
        let share = manifest.files.iter().skip(rank).step_by(size);
        verify_bytes(path, &manifest, share)?;
        let state = read_file(path, STATE_FILE)?;
        let state: TrainerState = serde_json::from_slice(&state)
            .map_err(|error| damaged(Damage::State(error.to_string())))?;
        if state.format_version > LATEST_VERSION {
            return Err(newer(path, state.format_version));
        }
        check_step(path, &manifest, &state).map_err(damaged)?;
        Ok(Self {
            path: path.into(),
            state,
            manifest,
        })
    }

    /// The weights.
    ///
    /// # Errors
    /// [`CheckpointError::Files`] if they are no safetensors.
    pub fn model(&self) -> Result<Tensors> {
        Ok(Tensors::open_folder(&self.path, "model")?)
    }

    /// The optimizer states.
    ///
    /// # Errors
    /// [`CheckpointError::Files`] if they are no safetensors.
    pub fn optimizer(&self) -> Result<Tensors> {
        Ok(Tensors::open_folder(&self.path, "optimizer")?)
    }

    /// One of its small files; none if it does not have it.
    ///
    /// # Errors
    /// [`CheckpointError::Files`] if it cannot be read.
    pub fn file(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let listed = self.manifest.files.iter().any(|file| file.name == name);
        listed.then(|| read_file(&self.path, name)).transpose()
    }

    /// Its files, in the order of the manifest.
    pub fn files(&self) -> &[ManifestFile] {
        &self.manifest.files
    }
}

fn newer(path: &Path, found: u64) -> CheckpointError {
    CheckpointError::Newer {
        path: path.into(),
        found,
        known: LATEST_VERSION,
    }
}

fn read_manifest(path: &Path) -> Result<Manifest> {
    let damaged = |damage| CheckpointError::Damaged {
        path: path.into(),
        damage,
    };
    let text = match files::read_small(&path.join(MANIFEST_FILE)) {
        Err(error) if error.kind() == ErrorKind::NotFound && path.is_dir() => {
            return Err(damaged(Damage::NoManifest));
        }
        text => text.map_err(FilesError::at("read", path))?,
    };
    Manifest::parse(&text).map_err(|error| match error {
        Unbelievable::Newer(found) => newer(path, found),
        Unbelievable::Damaged(damage) => damaged(damage),
    })
}

fn read_file(folder: &Path, name: &str) -> Result<Vec<u8>> {
    let path = folder.join(name);
    Ok(files::read_regular(&path).map_err(FilesError::at("read", &path))?)
}

/// Checks that the folder's name, the manifest and the state have the same step.
fn check_step(path: &Path, manifest: &Manifest, state: &TrainerState) -> Result<(), Damage> {
    let step = state.step;
    if manifest.step != step {
        let reason = format!("it is of step {}, the state of step {step}", manifest.step);
        return Err(Damage::Manifest(reason));
    }
    let name = path
        .file_name()
        .and_then(|name| Name::parse(&name.to_string_lossy()));
    match name {
        Some(Name::Saved(name) | Name::Old(name)) if name != step => {
            Err(Damage::OtherStep { name, step })
        }
        _ => Ok(()),
    }
}

/// Compares all files with the manifest by name and size. Other hidden files are allowed, because some file systems and
/// file managers make them.
fn verify_sizes(path: &Path, manifest: &Manifest) -> Result {
    let damaged = |damage| CheckpointError::Damaged {
        path: path.into(),
        damage,
    };
    let listed = |name: &str| manifest.files.iter().any(|file| file.name == name);
    for entry in Disk.list(path).map_err(FilesError::at("list", path))? {
        if !entry.name.starts_with('.') && entry.name != MANIFEST_FILE && !listed(&entry.name) {
            return Err(damaged(Damage::Extra(entry.name)));
        }
    }
    for file in &manifest.files {
        let name = file.name.clone();
        match fs::metadata(path.join(&name)) {
            Ok(found) if found.is_file() && found.len() == file.bytes => {}
            Ok(found) if found.is_file() => {
                let (expected, found) = (file.bytes, found.len());
                return Err(damaged(Damage::Size {
                    name,
                    expected,
                    found,
                }));
            }
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(FilesError::at("read", &path.join(&name))(error).into());
            }
            _ => return Err(damaged(Damage::Missing(name))),
        }
    }
    Ok(())
}

/// Compares the bytes of some files with the manifest.
fn verify_bytes<'a>(
    path: &Path,
    manifest: &Manifest,
    share: impl Iterator<Item = &'a ManifestFile>,
) -> Result {
    let share: Vec<&ManifestFile> = share.collect();
    let found = share.par_iter().map(|file| {
        let path = path.join(&file.name);
        crc32_of(&path, file.bytes)
            .map(digits)
            .map_err(FilesError::at("read", &path))
    });
    let found = found.collect::<Result<Vec<_>, _>>()?;
    let wrong = share
        .iter()
        .zip(&found)
        .find(|(file, found)| file.crc32 != **found);
    let Some((file, found)) = wrong else {
        return Ok(());
    };
    let name = file.name.clone();
    let mut others = manifest.files.iter();
    let swapped = others.find(|other| (other.bytes, &other.crc32) == (file.bytes, found));
    Err(CheckpointError::Damaged {
        path: path.into(),
        damage: match swapped.map(|other| other.name.clone()) {
            Some(other) => Damage::Swapped { name, other },
            None => Damage::Changed(name),
        },
    })
}

/// The checksum of a file of `bytes` bytes.
fn crc32_of(path: &Path, bytes: u64) -> io::Result<u32> {
    let pieces = (0..bytes.div_ceil(PIECE_BYTES))
        .into_par_iter()
        .map(|piece| {
            let start = piece * PIECE_BYTES;
            let mut file = File::open(path)?;
            file.seek(SeekFrom::Start(start))?;
            hash_of(file.take(PIECE_BYTES.min(bytes - start)))
        });
    let pieces = pieces.collect::<io::Result<Vec<_>>>()?;
    let mut whole = crc32fast::Hasher::new();
    pieces.iter().for_each(|piece| whole.combine(piece));
    Ok(whole.finalize())
}

fn hash_of(mut from: impl Read) -> io::Result<crc32fast::Hasher> {
    let (mut hasher, mut buffer) = (crc32fast::Hasher::new(), vec![0; 1 << 18]);
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(hasher),
            read => hasher.update(&buffer[..read]),
        }
    }
}
