//! The tensors of a folder: one file, or the shards that an index names.

use crate::FilesError;
use crate::parts::TensorParts;
use crate::tensor_file::TensorFile;
use crate::unique::Unique;
use serde::Deserialize;
use std::collections::HashMap;
use std::path::{Component, Path};

/// One safetensors file or several, as one set of named tensors.
#[derive(Debug)]
pub struct TensorFiles {
    files: Vec<TensorFile>,
    by_name: HashMap<String, usize>,
}

/// `STEM.safetensors.index.json`. Its `metadata` is not read: the sizes that other programs write there may be wrong.
#[derive(Deserialize)]
struct Index {
    weight_map: Unique<String>,
}

impl TensorFiles {
    /// Opens `STEM.safetensors` of a folder, or if there is none, the shards of `STEM.safetensors.index.json`.
    ///
    /// # Errors
    /// [`FilesError`] that names the file; [`FilesError::Index`] if a shard's name is a path, or the index and the shards
    /// differ in a tensor.
    pub fn open_folder(folder: &Path, stem: &str) -> Result<Self, FilesError> {
        let whole = folder.join(format!("{stem}.safetensors"));
        if whole.exists() {
            let file = TensorFile::open(&whole)?;
            let names = file.iter().map(|(name, _)| (name.to_owned(), 0));
            return Ok(Self {
                by_name: names.collect(),
                files: vec![file],
            });
        }
        let index = folder.join(format!("{stem}.safetensors.index.json"));
        if index.exists() {
            return Self::open_index(&index);
        }
        Err(FilesError::NoTensors {
            folder: folder.into(),
            stem: stem.into(),
        })
    }

    /// Opens the shards that an index names, all in its own folder.
    fn open_index(path: &Path) -> Result<Self, FilesError> {
        let misfit = |reason| FilesError::Index {
            path: path.into(),
            reason,
        };
        let text = crate::read_small(path).map_err(FilesError::at("read", path))?;
        let index: Index = serde_json::from_slice(&text)
            .map_err(|error| misfit(format!("it cannot be read: {error}")))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let (mut files, mut opened) = (Vec::new(), HashMap::new());
        let mut by_name = HashMap::new();
        for (name, shard) in index.weight_map.0 {
            if !is_plain_name(&shard) {
                return Err(misfit(format!(
                    "`{shard}` is not the name of a file beside it"
                )));
            }
            let at = match opened.get(&shard) {
                Some(&at) => at,
                None => {
                    files.push(TensorFile::open(&folder.join(&shard))?);
                    opened.insert(shard.clone(), files.len() - 1);
                    files.len() - 1
                }
            };
            if files[at].get(&name).is_none() {
                return Err(misfit(format!("`{name}` is not in `{shard}`")));
            }
            by_name.insert(name, at);
        }
        for (shard, at) in opened {
            let mut names = files[at].iter().map(|(name, _)| name);
            if let Some(name) = names.find(|&name| by_name.get(name) != Some(&at)) {
                return Err(misfit(format!(
                    "it does not say that `{name}` is in `{shard}`"
                )));
            }
        }
        Ok(Self { files, by_name })
    }

    /// A tensor by name.
    pub fn get(&self, name: &str) -> Option<TensorParts<'_>> {
        self.files[*self.by_name.get(name)?].get(name)
    }

    /// All names and tensors, file by file in the order of their data.
    pub fn iter(&self) -> impl Iterator<Item = (&str, TensorParts<'_>)> {
        self.files.iter().flat_map(TensorFile::iter)
    }
}

/// Whether a name read from a file names a file in the same folder, and is not a path out of it.
pub fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name)
        && !name.contains(['\\', '\0'])
}
