//! One safetensors file, whose tensors are read a chunk at a time.

use crate::header::{Header, TensorEntry, header_length, parse_header};
use crate::parts::{FileRange, Parts, TensorParts};
use crate::{FilesError, host_room};
use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A safetensors file whose header has been checked. Its data is neither held nor mapped, since mapped pages count as
/// memory of this process until the system reclaims them.
#[derive(Debug)]
pub(crate) struct TensorFile {
    file: File,
    path: PathBuf,
    header: Header,
    by_name: HashMap<String, usize>,
}

impl TensorFile {
    /// Opens a file and checks its header. Its data is not touched.
    ///
    /// # Errors
    /// [`FilesError::File`], [`FilesError::NotSafetensors`], or [`FilesError::Memory`] if there is no memory for the
    /// header.
    pub(crate) fn open(path: &Path) -> Result<Self, FilesError> {
        let refused = |reason| FilesError::NotSafetensors {
            path: path.into(),
            reason,
        };
        let failed = || FilesError::at("read", path);
        let file = open_plain(path)?;
        let size = file.metadata().map_err(failed())?.len() as usize;
        let mut length = vec![0; size.min(8)];
        file.read_exact_at(&mut length, 0).map_err(failed())?;
        let length = header_length(&length, size).map_err(refused)?;
        let mut text = host_room(length)?;
        file.read_exact_at(&mut text, 8).map_err(failed())?;
        let header = parse_header(&text, size).map_err(refused)?;
        let names = header.tensors.iter().enumerate();
        let by_name = names
            .map(|(index, entry)| (entry.name.clone(), index))
            .collect();
        Ok(Self {
            file,
            path: path.into(),
            header,
            by_name,
        })
    }

    /// A tensor by name.
    pub(crate) fn get(&self, name: &str) -> Option<TensorParts<'_>> {
        self.entry(name).map(|entry| self.tensor(entry))
    }

    /// A tensor's entry in the header.
    pub(crate) fn entry(&self, name: &str) -> Option<&TensorEntry> {
        let index = self.by_name.get(name);
        index.map(|&index| &self.header.tensors[index])
    }

    /// A tensor's bytes in the file.
    pub(crate) fn extent(&self, entry: &TensorEntry) -> FileRange<'_> {
        FileRange {
            file: &self.file,
            path: &self.path,
            bytes: entry.data.clone(),
        }
    }

    /// All names and tensors in the order of their data.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, TensorParts<'_>)> {
        let entries = self.header.tensors.iter();
        entries.map(|entry| (entry.name.as_str(), self.tensor(entry)))
    }

    fn tensor<'a>(&'a self, entry: &'a TensorEntry) -> TensorParts<'a> {
        TensorParts {
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: Parts::in_files([self.extent(entry)]),
        }
    }
}

/// Opens a regular file and refuses anything else: opening a pipe would wait for its writer.
fn open_plain(path: &Path) -> Result<File, FilesError> {
    let found = fs::metadata(path).map_err(FilesError::at("read", path))?;
    if !found.is_file() {
        return Err(FilesError::NotSafetensors {
            path: path.into(),
            reason: "it is not a file".into(),
        });
    }
    File::open(path).map_err(FilesError::at("read", path))
}
